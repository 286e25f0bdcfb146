"""Processes of a job end soon after their launcher has been killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

LAUNCHER = """
import os, subprocess, sys
ticks = open("/proc/self/stat").read().rpartition(")")[2].split()[19]
os.environ["FLASH_LAUNCHER"] = f"{os.getpid()}.{ticks}.1"
process = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
os.read(0, 1) if sys.argv[2] == "wait" else os._exit(0)
os.kill(os.getpid(), 9)
"""
"""Program that starts a process in a session of its own, as a launcher does, and waits for its input or ends at
once."""

PROCESS = """
import os, signal, sys, time
from flash.run.processes.launch_state import end_with_launcher
signal.signal(signal.SIGTERM, {handler})
end_with_launcher({grace}, speaks=True)
print("here", flush=True)
while True: time.sleep(0.1)  # a signal that comes just before a sleep is heeded after it
"""
"""Program that watches its launcher, with a handler of SIGTERM and seconds for its end."""
IN_ORDER = "lambda *_: (os.write(1, b'in order\\n'), os._exit(0))"
"""Not by `print`: it fails where the signal comes while `here` is being printed."""
IGNORING = "signal.SIG_IGN"
"""Handler with which SIGTERM has no effect."""


def kill_launcher(handler: str, grace: float) -> str:
    """Kill a launcher whose process runs. Returns the output of the process until its end."""
    command = [sys.executable, "-c", LAUNCHER, PROCESS.format(handler=handler, grace=grace), "wait"]
    launcher = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "here\n"
    output, errors = launcher.communicate("x", timeout=60)
    assert launcher.returncode == -signal.SIGKILL
    assert f"process {launcher.pid}, which started this run, is gone" in errors
    return output


def test_a_killed_launcher_interrupts_its_processes() -> None:
    assert kill_launcher(IN_ORDER, grace=60) == "in order\n"


def test_a_process_that_does_not_heed_the_interrupt_is_killed() -> None:
    assert kill_launcher(IGNORING, grace=0.1) == ""


def test_without_a_grace_a_process_is_killed_at_once() -> None:
    assert kill_launcher(IN_ORDER, grace=0) == ""


def test_a_process_ends_though_nobody_reads_any_more_what_it_says() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", LAUNCHER, PROCESS.format(handler=IN_ORDER, grace=60), "wait"]
    launcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=write, text=True)
    os.close(write)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "here\n"
    assert launcher.communicate("x", timeout=20)[0] == "in order\n"


def test_a_killed_torchrun_interrupts_the_launcher() -> None:
    watching = PROCESS.replace("end_with_launcher({grace}, speaks=True)", "end_with_torchrun()")
    watching = watching.replace("import end_with_launcher", "import end_with_torchrun")
    command = [sys.executable, "-c", LAUNCHER, watching.format(handler=IN_ORDER), "wait"]
    torchrun = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TORCHELASTIC_RUN_ID": "x"},
    )
    assert torchrun.stdout is not None
    assert torchrun.stdout.readline() == "here\n"
    assert torchrun.communicate("x", timeout=60)[0] == "in order\n"


def test_a_killed_program_interrupts_the_command_that_it_has_started() -> None:
    watching = PROCESS.replace("end_with_launcher({grace}, speaks=True)", "end_with_parent()")
    watching = watching.replace("import end_with_launcher", "import end_with_parent")
    command = [sys.executable, "-c", LAUNCHER, watching.format(handler=IN_ORDER), "wait"]
    program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    assert program.stdout.readline() == "here\n"
    assert program.communicate("x", timeout=60)[0] == "in order\n"


def test_a_torchrun_outside_of_the_container_is_not_watched() -> None:
    program = (
        "import os, threading\nfrom flash.run.processes.launch_state import end_with_torchrun\n"
        "end_with_torchrun()\nprint(os.getppid(), threading.active_count())"
    )
    done = subprocess.run(
        ["unshare", "--pid", "--fork", sys.executable, "-c", program],
        env=os.environ | {"TORCHELASTIC_RUN_ID": "x"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("0 1\n", "")


def test_a_process_whose_launcher_is_gone_already_ends_at_once() -> None:
    program = PROCESS.format(handler=IGNORING, grace=60)
    delayed = "import os, time\nwhile os.getppid() == int(os.environ['FLASH_LAUNCHER'].split('.')[0]): pass\n"
    command = [sys.executable, "-c", LAUNCHER, delayed + program, "leave"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("", "")


def test_another_process_with_the_id_of_the_launcher_is_not_the_launcher() -> None:
    program = PROCESS.format(handler=IN_ORDER, grace=60)
    environment = {**os.environ, "FLASH_LAUNCHER": f"{os.getpid()}.1.1"}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (1, b"")


def test_the_start_of_a_process_is_found_whatever_its_name() -> None:
    program = """
import os
from flash.run.processes.launch_state import start_ticks
before = start_ticks(os.getpid())
with open("/proc/self/comm", "wb") as file:
    file.write(b"a) 7 \\xff")
print(start_ticks(os.getpid()) == before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True\n", "")
