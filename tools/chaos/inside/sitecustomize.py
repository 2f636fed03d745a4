"""Faults inside of every Python process of a run. Python imports this module at its start, where its
folder is in PYTHONPATH.

SLIME_CHAOS_FOLDER names a folder. While it holds `order.json`, the order is carried out, and each
process notes once in `fired.PID` that it met it:

    {"kind": "disk", "errno": 5, "below": "/run/ckpt", "name": ".safetensors", "times": 1}
        the first `times` operations that change a path below `below` with `name` in it fail, in each
        process
    {"kind": "clock", "seconds": 3600}
        time.time and time.time_ns are so many seconds ahead
"""

import json
import os
import sys
import time

FOLDER = os.environ.get("SLIME_CHAOS_FOLDER")
LOOK_S = 0.1
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
CHANGES = {"os.rename": 2, "os.remove": 1, "os.mkdir": 1, "os.truncate": 1}


class Orders:
    """What is to break now."""

    def __init__(self, folder):
        self.path, self.folder = os.path.join(folder, "order.json"), folder
        self.looked_at, self.stamp, self.order, self.left = -1.0, None, {}, 0

    def current(self, *, now):
        """The order; read anew at most every LOOK_S seconds."""
        if now - self.looked_at < LOOK_S:
            return self.order
        self.looked_at = now
        try:
            stamp = os.stat(self.path).st_mtime_ns
            if stamp != self.stamp:
                with open(self.path, encoding="utf-8") as file:
                    self.order = json.load(file)
                self.stamp, self.left = stamp, self.order.get("times", 1)
        except (OSError, ValueError):
            self.stamp, self.order = None, {}
        return self.order

    def note(self, what):
        """This process has met the order."""
        path = os.path.join(self.folder, f"fired.{os.getpid()}")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(descriptor, f"{what}\n".encode())
        os.close(descriptor)


def watch_disk(orders, monotonic):
    """Operations on files meet the order."""
    is_inside = False

    def hook(event, values):
        nonlocal is_inside
        if is_inside or (event != "open" and event not in CHANGES):
            return
        if event == "open" and not (isinstance(values[2], int) and values[2] & WRITES):
            return
        is_inside = True
        try:
            order = orders.current(now=monotonic())
            if order.get("kind") != "disk" or orders.left <= 0:
                return
            paths = [
                os.fspath(v)
                for v in values[: CHANGES.get(event, 1)]
                if isinstance(v, str | os.PathLike)
            ]
            meant = [
                p
                for p in paths
                if isinstance(p, str) and p.startswith(order["below"]) and order["name"] in p
            ]
            if not meant:
                return
            orders.left -= 1
            orders.note(f"{event} {meant[0]}")
        finally:
            is_inside = False
        raise OSError(order["errno"], os.strerror(order["errno"]), meant[0])

    sys.addaudithook(hook)


def move_clock(orders, monotonic):
    """time.time is ahead while the order stands."""
    real, real_ns = time.time, time.time_ns
    noted = set()

    def ahead():
        order = orders.current(now=monotonic())
        if order.get("kind") != "clock":
            return 0
        if orders.stamp not in noted:
            noted.add(orders.stamp)
            orders.note(f"clock {order['seconds']}")
        return order["seconds"]

    time.time = lambda: real() + ahead()
    time.time_ns = lambda: real_ns() + ahead() * 1_000_000_000


if FOLDER and os.path.isdir(FOLDER):
    watch_disk(Orders(FOLDER), time.monotonic)
    move_clock(Orders(FOLDER), time.monotonic)
