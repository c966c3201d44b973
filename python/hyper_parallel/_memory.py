"""Memory for large gradients: mapped once with huge pages, used again and again.

Fresh 4 KB pages cost more than computing what is written to them; frameworks return large tensors to the system.
"""

import ctypes
import mmap
import os
import threading
import weakref

SMALLEST = 4 << 20  # bytes; below it the framework's own allocator does
_HUGE = 2 << 20

_lock = threading.RLock()  # a finalizer may run inside of it
_idle = {}  # bytes -> maps that no tensor uses
_pid = os.getpid()


def _map(size):
    block = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        block.madvise(mmap.MADV_HUGEPAGE)
    except (OSError, AttributeError):
        pass  # a kernel without them: small pages do
    return block


def _give_back(size, block):
    with _lock:
        _idle.setdefault(size, []).append(block)


def buffer(size):
    """A writable buffer object of `size` bytes, on 2 MB. Its memory is kept for the next one when it is dropped."""
    size = -(-size // _HUGE) * _HUGE
    with _lock:
        idle = _idle.get(size)
        block = idle.pop() if idle else None
    if block is None:
        block = _map(size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(block))
    made = (ctypes.c_char * size).from_buffer(block, -address % _HUGE)
    weakref.finalize(made, _give_back, size, block).atexit = False
    return made


def trim():
    """Returns the memory that no tensor uses to the system."""
    with _lock:
        _idle.clear()
