"""Tasks done by several threads at once: copies and checksums, which let other threads run meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Lock, Thread


def do_all(tasks: Iterable[Callable[[], None]], num_threads: int) -> None:
    """Do every task, each on one of `num_threads` threads; tasks are taken in their order.

    Raises: what the earliest of the failed tasks raised; after a failure no other task is begun.
    """
    waiting = enumerate(tasks)
    failures: dict[int, BaseException] = {}
    taking = Lock()

    def work() -> None:
        while True:
            with taking:
                number, task = next(waiting, (0, None))
                if task is None or failures:
                    return
            try:
                task()
            except BaseException as error:
                failures[number] = error

    # Daemons: a process that must end does not wait for a disk that hangs.
    threads = [Thread(target=work, name="worker", daemon=True) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[min(failures)]
