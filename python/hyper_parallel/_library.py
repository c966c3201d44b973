"""The C library through ctypes: include/hmoe.h, as much of it as Python needs."""

import ctypes
import importlib.resources
import os
from ctypes import POINTER, Structure, byref, c_char, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64
from ctypes import c_void_p

F32, BF16, F16 = 0, 1, 2
I32, I64 = 0, 1
KN, NK = 0, 1
OK, LIMIT, MISMATCH, TIMEOUT, PEER, ABORTED = 0, 3, 4, 10, 11, 12

ALLGATHER = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p, c_size_t)


class _Sized(Structure):
    """A struct of the API: its first member is its size."""

    def __init__(self, **members):
        super().__init__(size=ctypes.sizeof(type(self)), **members)


class GroupOptions(_Sized):
    _fields_ = [("size", c_size_t), ("rank", c_int), ("ranks", c_int), ("workers", c_int), ("allgather", ALLGATHER),
                ("allgather_context", c_void_p), ("knobs", c_char_p)]


class Activation(Structure):
    _fields_ = [("alpha", c_float), ("limit", c_float), ("offset", c_float)]


class PlanOptions(_Sized):
    _fields_ = [("size", c_size_t), ("hidden", c_int64), ("inner", c_int64), ("experts", c_int), ("topk", c_int),
                ("tokens_max", c_int64), ("receive_max", c_int64), ("dtype", c_int), ("layout", c_int),
                ("gating", c_int), ("activation", Activation), ("calls_max", c_int), ("knobs", c_char_p),
                ("training", c_int), ("shared_experts", c_int), ("shared_inner", c_int64)]


class Layer(Structure):
    _fields_ = [(name, c_void_p) for name in ("up_proj", "down_proj", "up_bias", "down_bias", "shared_up_proj",
                                              "shared_down_proj")]


class Gradients(Structure):
    _fields_ = [(name, c_void_p) for name in ("dy", "dx", "d_topk_weights", "d_up_proj", "d_down_proj", "d_up_bias",
                                              "d_down_bias", "d_shared_up_proj", "d_shared_down_proj")]
    _fields_ += [("dw_type", c_int), ("dw_mode", c_int)]


class Call(_Sized):
    _fields_ = [("size", c_size_t), ("tokens", c_int64), ("x", c_void_p), ("topk_ids", c_void_p),
                ("topk_weights", c_void_p), ("ids_type", c_int), ("weights_type", c_int), ("layer", Layer),
                ("y", c_void_p), ("saved", c_void_p), ("grad", Gradients), ("layer_number", c_int),
                ("tag", c_uint64), ("status", c_int), ("error", c_char * 240), ("plan", c_void_p),
                ("phase", c_uint32)]


class SavedOptions(_Sized):
    _fields_ = [("size", c_size_t), ("keep_rows", c_int), ("recompute", c_int), ("memory", c_void_p),
                ("memory_bytes", c_size_t)]


class Error(RuntimeError):
    """The library refused or failed; `status` is an enum hmoe_status."""

    def __init__(self, status, text):
        super().__init__(text)
        self.status = status


_FUNCTIONS = {
    "hmoe_group_create": [POINTER(GroupOptions), POINTER(c_void_p)],
    "hmoe_group_destroy": [c_void_p],
    "hmoe_group_abort": [c_void_p, c_char_p],
    "hmoe_plan_create": [c_void_p, POINTER(PlanOptions), POINTER(c_void_p)],
    "hmoe_plan_destroy": [c_void_p],
    "hmoe_plan_settle": [c_void_p],
    "hmoe_saved_create": [c_void_p, POINTER(SavedOptions), POINTER(c_void_p)],
    "hmoe_saved_destroy": [c_void_p],
    "hmoe_saved_clear": [c_void_p],
    "hmoe_forward": [c_void_p, POINTER(Call)],
    "hmoe_backward": [c_void_p, POINTER(Call)],
}


def _path():
    """HMOE_LIBRARY, or the library inside the installed package (which is not beside an editable one's sources)."""
    given = os.environ.get("HMOE_LIBRARY")
    if given:
        return given
    file = importlib.resources.files("hyper_parallel").joinpath("libhmoe.so")
    if file.is_file():
        return str(file)
    raise ImportError("hyper_parallel has no libhmoe.so: install it with `pip install .`, or name a library in the"
                      " environment variable HMOE_LIBRARY")


def _load():
    library = ctypes.CDLL(_path())
    for name, arguments in _FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_int
    library.hmoe_last_error.restype = c_char_p
    return library


library = _load()


def check(status):
    """Raises Error with the library's text, unless the status is OK."""
    if status != OK:
        raise Error(status, library.hmoe_last_error().decode())


def make(function, *arguments):
    """Calls a function whose last argument is where the made handle goes; returns the handle."""
    handle = c_void_p()
    check(function(*arguments, byref(handle)))
    return handle
