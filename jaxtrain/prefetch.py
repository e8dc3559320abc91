"""Batches on the devices one ahead of the step that uses them.

    with DevicePrefetch(batches.at(position), lambda batch: to_devices(batch, sharding)) as prefetch:
        for batch, waited_s in prefetch:
            state, metrics = program.step(state, batch)
            position += micro_batch_size

The position is the consumer's count of what it took, never the producer's: what was read ahead and not consumed is read
again after a resume.
"""

import collections
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

_STOPPED = object()
_POLL_S = 0.1


def to_devices(batch: Any, shardings: Any) -> Any:
    """Host arrays of this process -> global device arrays, with nothing shared between the two.

    ``batch``: a tree of arrays; ``shardings``: one sharding for all of them, or a tree (prefix) of shardings. With
    several processes each leaf holds the part of this process: its rows ``p*B/n`` to ``(p+1)*B/n``, where the mesh has
    its devices in process order, become those rows of the global array. Raises ValueError, with the leaf's name, where
    a dim does not divide.

    A NumPy leaf is copied first: on CPU ``jax.device_put`` keeps the NumPy buffer itself where it is aligned (also
    with ``may_alias=False``; jax 0.10.2 and 0.12.0.1), and another device may still be reading it after the call.
    """

    leaves, tree = jax.tree.flatten(batch)
    private = [leaf if isinstance(leaf, jax.Array) else np.array(leaf) for leaf in leaves]
    targets = jax.tree.leaves(jax.tree.broadcast(shardings, batch))
    if jax.process_count() == 1 and not any(isinstance(leaf, jax.Array) for leaf in leaves):
        try:
            return tree.unflatten(_placing(tuple(targets))(*private))
        except (ValueError, FloatingPointError):
            pass  # it does not name the leaf, and under jax_debug_nans refuses a NaN; what follows does better

    def put(path, leaf, sharding):
        try:
            if jax.process_count() == 1:
                return jax.device_put(leaf, sharding)
            return jax.make_array_from_process_local_data(sharding, leaf)
        except ValueError as error:
            name = jax.tree_util.keystr(path, simple=True, separator="/") or "batch"
            raise ValueError(f"{name}: {leaf.shape} does not fit its sharding: {error}") from error

    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(batch)]
    return tree.unflatten(map(put, paths, private, targets))


@functools.lru_cache
def _placing(shardings: tuple[jax.sharding.Sharding, ...]) -> Callable[..., tuple[jax.Array, ...]]:
    """A compiled function that computes nothing: its arguments are placed by C++, which takes small leaves to the
    devices in a fifth of ``jax.device_put``'s time (5 leaves of 512 bytes: 29 us against 152)."""
    return jax.jit(lambda *leaves: leaves, in_shardings=shardings, out_shardings=shardings)


class DevicePrefetch:
    """Iterator of ``(put(item), seconds_waited)`` over ``items``, in order, made ``depth`` ahead by one thread.

    At most ``depth`` results exist beyond the one consumed last. ``depth=0`` makes each when asked, without a thread.
    ``seconds_waited`` is how long ``next`` blocked: the time that the input held up the loop. An exception of
    ``items`` or ``put`` is raised, with its traceback, at the place in the order where its result would have come.

    ``put`` runs in the thread: thread-local contexts of jax (a default mesh, a transfer guard) do not reach it.

    It owns ``items`` from here on: ``close()``, the end of a ``with``, dropping the object and the interpreter's exit
    all end the thread, which then calls ``items.close()`` if there is one. ``next`` after ``close`` is a RuntimeError.
    """

    def __init__(self, items: Iterable[Any], put: Callable[[Any], Any], depth: int = 1):
        if depth < 0:
            raise ValueError(f"prefetch depth {depth}: must be at least 0")
        self._ahead = _Ahead(iter(items), put, depth)
        # On a method of _ahead, not of self, which it must not keep alive. It also runs at the interpreter's exit.
        self._finalizer = weakref.finalize(self, self._ahead.abandon)

    def __iter__(self) -> "DevicePrefetch":
        return self

    def __next__(self) -> tuple[Any, float]:
        taken = self.take()
        self.ahead()
        assert taken is not None
        return taken

    def take(self, stop: Callable[[], bool] = lambda: False) -> tuple[Any, float] | None:
        """``next``, but None as soon as ``stop()`` is true while nothing is ready: a source that hangs must not hold up
        a loop that was asked to save. ``stop`` is asked every 0.1 s; with ``depth=0`` it is not.

        The thread goes on at ``ahead()``, or when nothing is ready: Python runs one thread at a time, so a loop calls
        ``ahead()`` when it has dispatched its step and is about to wait for the devices.
        """
        begin = time.perf_counter()
        result = self._ahead.take(stop)
        return None if result is _STOPPED else (result, time.perf_counter() - begin)

    def ahead(self) -> None:
        """Let the thread make what comes next, up to ``depth``; returns at once."""
        self._ahead.go()

    def __enter__(self) -> "DevicePrefetch":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread and drop what was not consumed; again is a no-op.

        A thread that is inside ``items`` or ``put`` cannot be interrupted: it is waited for up to ``timeout_s``, then
        left to end by itself after that call.
        """
        self._finalizer.detach()
        self._ahead.close()
        self._ahead.join(timeout_s)


class _Ahead:
    """The results made and not yet taken. The thread refers to this only, so the DevicePrefetch can be dropped."""

    def __init__(self, items: Iterator[Any], put: Callable[[Any], Any], depth: int):
        self._items = items
        self._made = (put(item) for item in items)  # in a generator a StopIteration of put is an error, not the end
        self._depth = depth
        self._ready: collections.deque[Any] = collections.deque()
        self._end: BaseException | None = None  # what next raises once _ready is empty
        self._closed = False
        self._go = True
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        if depth:
            # A daemon: one that hangs inside items must not keep the interpreter from its exit.
            self._thread = threading.Thread(target=self._run, name="jaxtrain-prefetch", daemon=True)
            self._thread.start()

    def take(self, stop: Callable[[], bool]) -> Any:
        if self._thread is None and self._end is None and not self._closed:
            self._make()
        with self._changed:
            if not self._ready:
                self._go = True
                self._changed.notify_all()
            while not self._changed.wait_for(lambda: self._ready or self._end is not None or self._closed, _POLL_S):
                if stop():
                    return _STOPPED
            if self._closed:
                raise RuntimeError("this DevicePrefetch is closed")
            if self._ready:
                self._go = False
                return self._ready.popleft()
            raise self._end.with_traceback(self._end_traceback)

    def go(self) -> None:
        with self._changed:
            self._go = True
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while self._end is None:
                with self._changed:
                    # Waiting BEFORE pulling bounds what exists to depth; a full queue would hold depth + 1.
                    self._changed.wait_for(lambda: self._closed or (self._go and len(self._ready) < self._depth))
                    if self._closed:
                        return
                self._make()
        finally:
            self._close_items()

    def _make(self) -> None:
        """One more result, or the end."""
        try:
            result, end = next(self._made), None
        except BaseException as error:  # also KeyboardInterrupt: it belongs to the consumer
            result, end = None, error
        with self._changed:
            if end is not None:
                self._end, self._end_traceback = end, end.__traceback__
            elif not self._closed:
                self._ready.append(result)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is None:
            self._close_items()

    def join(self, timeout_s: float) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def abandon(self) -> None:
        """For the garbage collector, which may run in any thread and must not wait; at the exit there is time to."""
        self.close()
        if not threading.main_thread().is_alive():
            self.join(5.0)

    def _close_items(self) -> None:
        close = getattr(self._items, "close", None)
        if close is not None:
            close()
