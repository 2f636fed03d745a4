"""Graders that misbehave, for tests of the grader pool: its worker imports this module by name."""

import os
import time


def huge_power(response, label):
    """Busy inside one C call, which no Python-level timeout can leave."""
    return len(str(10 ** (10**8)))


def endless(response, label):
    while True:
        time.sleep(1)


def crash(response, label):
    os._exit(3)


def noisy(response, label):
    print('{"id": 0, "value": 99}', flush=True)
    return 1


def greedy(response, label):
    return len(bytearray(16 * 2**30))


def broken(response, label):
    raise ValueError("no such form")


def worker_pid(response, label):
    return os.getpid()
