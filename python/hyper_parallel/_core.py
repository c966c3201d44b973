"""Groups, plans and saved states: what every front end shares. Tensors are addresses here."""

import atexit
import os
import sys
import threading

from . import _library as lib

LOCAL_TOKENS = 1024  # tokens_max of a first plan on one rank: slot rows, K * H elements a token, are allocated in full


def power_of_two(n):
    return 1 << max(0, n - 1).bit_length()


def address(tensor):
    return tensor.data_ptr() if tensor is not None else None


def call_of(floats, indices, x, topk_ids, topk_weights, up, down, extras):
    """A call that reads these tensors; `floats` and `indices`: a framework's dtypes -> the library's numbers."""
    return lib.Call(
        tokens=x.shape[0], x=x.data_ptr(), topk_ids=topk_ids.data_ptr(), topk_weights=topk_weights.data_ptr(),
        ids_type=indices[topk_ids.dtype], weights_type=floats[topk_weights.dtype],
        layer=lib.Layer(*map(address, (up, down, *extras[:4]))))


class Group:
    """One rank's part of an expert-parallel group; its plans are made when a shape is first seen.

    allgather: bytes -> list of every rank's bytes, in rank order; collective. Only for ranks > 1.
    """

    def __init__(self, rank=0, ranks=1, allgather=None):
        self.rank, self.ranks, self.pid = rank, ranks, os.getpid()
        self.dead, self.reason = False, ""
        self._allgather = allgather
        self._callback = lib.ALLGATHER(self._gather)  # kept alive as long as the group
        self._trouble = None  # what an allgather ran into, while C was calling it
        self._plans, self._retired = {}, []
        self._lock = threading.RLock()
        self.handle = self.make(lib.library.hmoe_group_create, lib.GroupOptions(
            rank=rank, ranks=ranks, allgather=self._callback if ranks > 1 else lib.ALLGATHER()))
        _groups.append(self)

    def make(self, function, *arguments):
        """A handle made by all ranks together."""
        try:
            return lib.make(function, *arguments)
        except lib.Error as error:
            trouble, self._trouble = self._trouble, None
            raise trouble or error from None

    def _gather(self, context, mine, every, count):
        try:
            data = lib.ctypes.string_at(mine, count)
            lib.ctypes.memmove(every, b"".join(self.gather(data)), count * self.ranks)
            return 0
        except Exception as error:  # cannot cross C
            self._trouble = error
            return 1

    def gather(self, mine):
        """Every rank's bytes. Without the others there is no group."""
        try:
            return self._allgather(mine)
        except Exception as error:
            self.dead, self.reason = True, str(error)
            raise

    def alive(self):
        """False once it failed, or in a forked child: then make another one."""
        return not self.dead and self.pid == os.getpid()

    def plan(self, shape, tokens):
        """The plan of this shape: made, or made larger, when need be."""
        plan = self._plans.get(shape)
        if plan is None or (self.ranks == 1 and tokens > plan.tokens_max):
            with self._lock:
                plan = self._plans.get(shape)
                if plan is None or (self.ranks == 1 and tokens > plan.tokens_max):
                    plan = self._replan(shape, tokens)
        return plan

    def _replan(self, shape, tokens):
        """Collective. What the old plan saved stays usable."""
        if self.ranks > 1:
            tokens = max(int.from_bytes(one, "little") for one in self.gather(tokens.to_bytes(8, "little")))
        else:
            tokens = max(tokens, LOCAL_TOKENS)
        plan = Plan(self, shape, power_of_two(tokens))
        if shape in self._plans:
            self._retired.append(self._plans[shape])
        self._plans[shape] = plan
        return plan

    def forward(self, shape, call):
        """Runs it; returns what it saved if the shape is for training. Tokens beyond the plan's limit make every
        rank's plan larger: all find out alike."""
        while True:
            plan = self.plan(shape, call.tokens)
            saved = plan.take_saved() if shape.training else None
            call.saved = saved.handle if saved else None
            try:
                plan.run(lib.library.hmoe_forward, call)
                return saved
            except lib.Error as error:
                if error.status != lib.LIMIT:
                    raise
            with self._lock:
                self._replan(shape, call.tokens)

    def fail(self, reason):
        """Tells the other ranks that this one cannot make its next call: theirs end with the reason."""
        if self.ranks > 1 and self.alive():
            self.dead, self.reason = True, reason
            for plan in [*self._plans.values(), *self._retired]:
                lib.library.hmoe_plan_settle(plan.handle)
            lib.library.hmoe_group_abort(self.handle, reason.encode())

    def close(self):
        """At the process's end: what the others still read stays readable to them."""
        if self.pid != os.getpid() or self.handle is None:
            return
        self._allgather = lambda mine: [mine] * self.ranks  # nothing is agreed on any more
        for plan in [*self._plans.values(), *self._retired]:
            plan.close()
        self._plans, self._retired = {}, []
        lib.library.hmoe_group_destroy(self.handle)
        self.handle, self.dead = None, True
        _groups.remove(self)


class Plan:
    """One shape's plan. Calls of several threads take turns."""

    def __init__(self, group, shape, tokens_max):
        self.group, self.tokens_max = group, tokens_max
        self._lock = threading.Lock()
        self._free, self._handles = [], []
        self.handle = group.make(lib.library.hmoe_plan_create, group.handle, lib.PlanOptions(
            hidden=shape.hidden, inner=shape.inner, experts=shape.local * group.ranks, topk=shape.topk,
            tokens_max=tokens_max, dtype=shape.dtype, layout=shape.layout, gating=int(shape.interleaved),
            activation=lib.Activation(*shape.activation), training=int(shape.training),
            shared_experts=shape.shared_experts, shared_inner=shape.shared_inner))

    def run(self, function, call):
        if not self.group.alive():
            raise RuntimeError("the group of this forward has ended, or belongs to the process that this one was"
                               " forked from: run the forward again")
        with self._lock:
            status = function(self.handle, call)
        if status != lib.OK:
            self.group.dead |= status in (lib.TIMEOUT, lib.PEER, lib.ABORTED)
            raise lib.Error(status, call.error.decode() or lib.library.hmoe_last_error().decode())

    def take_saved(self):
        try:
            handle = self._free.pop()
            lib.check(lib.library.hmoe_saved_clear(handle))
        except IndexError:
            handle = lib.make(lib.library.hmoe_saved_create, self.handle, lib.SavedOptions())
            self._handles.append(handle)
        return Saved(self, handle)

    def close(self):
        for handle in self._handles:
            lib.library.hmoe_saved_destroy(handle)
        lib.library.hmoe_plan_destroy(self.handle)
        self.handle, self._handles = None, []


class Saved:
    """What a forward left for its backward. Dropping it gives its memory to the plan's next forward."""

    __slots__ = ("plan", "handle", "__weakref__")

    def __init__(self, plan, handle):
        self.plan, self.handle = plan, handle

    def __del__(self):
        self.plan._free.append(self.handle)  # emptied when it is used again


_groups = []
_local = None


def local_group():
    """This process's group of one rank."""
    global _local
    if _local is None or not _local.alive():
        _local = Group()
    return _local


class _Gather:
    """An allgather of bytes for a Group, over the one of a process group, `every(mine)`.

    Ranks may disagree on whether their group has failed: one that refused its arguments makes a new group in its next
    call, while others wait for it in the old one. So a head goes first, with the number of the group among those of
    this process group. Who finds a later one gives up; who finds an earlier one waits for that.
    """

    HEAD = 256  # bytes: the group's number, the payload's size, and why the group before failed

    def __init__(self, every, number, reason):
        self.every, self.number, self.reason = every, number, reason.encode()[:self.HEAD - 16]

    def __call__(self, mine):
        head = self.number.to_bytes(8, "little") + len(mine).to_bytes(8, "little") + self.reason
        while True:
            heads = self.every(head.ljust(self.HEAD, b"\0"))
            numbers = [int.from_bytes(one[:8], "little") for one in heads]
            if min(numbers) == self.number == max(numbers):
                break
            if self.number < max(numbers):
                reason = heads[numbers.index(max(numbers))][16:].rstrip(b"\0").decode(errors="replace")
                raise lib.Error(lib.ABORTED, reason or "another rank gave this group up")
        if len({one[8:16] for one in heads}) > 1:
            raise lib.Error(lib.MISMATCH, "the ranks do not make the same calls")
        return self.every(mine)


_by_key = {}  # process group -> (Group, its number)


def group_over(key, rank, ranks, every):
    """The Group over a process group: made when first asked for, by all its ranks, and made anew after a failure."""
    if ranks == 1:
        return local_group()
    group, number = _by_key.get(key, (None, -1))
    if group is None or not group.alive():
        reason = ""
        if group is not None:
            group.close()
            reason = group.reason
        group = Group(rank, ranks, _Gather(every, number + 1, reason))
        _by_key[key] = group, number + 1
    return group


@atexit.register
def _close_all():
    for group in list(_groups):
        if getattr(sys, "last_value", None) is not None:  # this process ends by an exception
            group.fail(f"rank {group.rank} ended: {sys.last_value!r:.150}")
        group.close()
