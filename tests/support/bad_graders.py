"""Graders that misbehave, for tests of the grader pool: its worker imports this module by name."""

import os
import subprocess
import sys
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


def family(response, label):
    """Starts 11 processes in all the usual ways, writes their ids to the file `response`, and hangs
    where `label` says so."""
    sleep = f"import time; {response!r}; time.sleep(300)"
    nested = f"import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleep!r}]); os._exit(0)"
    for number in range(7):
        subprocess.Popen([sys.executable, "-c", sleep], start_new_session=number > 2)
    subprocess.Popen([sys.executable, "-c", nested], start_new_session=True).wait()
    subprocess.Popen([sys.executable, "-c", nested]).wait()
    forked = set()
    for _ in range(2):
        forked.add(os.fork())
        if 0 in forked:
            os.setsid()
            time.sleep(300)
            os._exit(0)
    while len(_processes_with(sleep)) < 9:
        time.sleep(0.05)
    with open(response + ".part", "w") as ids:
        ids.write("\n".join(str(pid) for pid in _processes_with(sleep) | forked))
    os.rename(response + ".part", response)
    while label == "hang":
        time.sleep(1)
    if label == "crash":
        os._exit(3)
    return 1


def _processes_with(text):
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as words:
                    command = words.read().split(b"\0")
            except OSError:
                continue
            if command[1:3] == [b"-c", text.encode()]:
                found.add(int(entry))
    return found


def flood(response, label):
    """Prints `response` MB to stderr and to stdout each."""
    for fd in (2, 1):
        for _ in range(int(response)):
            os.write(fd, b"x" * 999_999 + b"\n")
    return 1


def forger(response, label):
    """Writes answers to every descriptor that it has, from this process and from a forked and an
    executed child; its own answer is 0."""
    code = (
        "import os\n"
        'lines = b\'\'.join(b\'{"id": %d, "value": 1}\\n{"value": 1}\\nstart {"value": 1}\\n\' % i for i in range(9))\n'
        "for fd in range(64):\n"
        "    try: os.write(fd, lines)\n"
        "    except OSError: pass\n"
    )
    exec(code)
    subprocess.run([sys.executable, "-c", code], close_fds=False, check=False)
    child = os.fork()
    if child == 0:
        exec(code)
        os._exit(0)
    os.waitpid(child, 0)
    return 0


def stray(response, label):
    """Writes to every descriptor without an end, whatever numbers its process was given."""
    while True:
        for fd in map(int, os.listdir("/proc/self/fd")):
            try:
                os.write(fd, b"y" * 60_000)
            except OSError:
                continue


def open_descriptors_of_a_child(response, label):
    """Descriptors above 2 that a forked child finds open."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(readable)
        found = [fd for fd in range(3, 64) if fd != writable and _is_open(fd)]
        os.write(writable, repr(found).encode())
        os._exit(0)
    os.close(writable)
    os.waitpid(child, 0)
    return os.read(readable, 1000).decode()


def _is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def big_value(response, label):
    return {"text": "z" * 3_000_000}


def length(response, label):
    return len(response)
