"""Children that run LLVM: they stay for the next request, and may end without the process that asks."""

import multiprocessing
import multiprocessing.spawn
import os
import pathlib
import re
import signal
import threading
import time

import pytest

pytest.importorskip("llvmlite.binding")

from pbkern.errors import InternalError, TargetError
from pbkern.targets.llvm import child, process

AMD, NVIDIA, ARM = "amdgcn-amd-amdhsa", "nvptx64-nvidia-cuda", "aarch64-unknown-linux-gnu"
TEXT = "define {kind} void @{name}(ptr %p) {{\n  store i32 {value}, ptr %p\n  ret void\n}}\n"
# LLVM prints "illegal VGPR to SGPR copy" and calls exit.
EXITS = """declare double @llvm.arithmetic.fence.f64(double)
define amdgpu_kernel void @k(ptr addrspace(1) %p) {
  %x = load double, ptr addrspace(1) %p
  %y = fmul double %x, 3.0
  %z = call double @llvm.arithmetic.fence.f64(double %y)
  store double %z, ptr addrspace(1) %p
  ret void
}
"""
# LLVM prints "Cannot select" and calls abort.
ABORTS = """declare i64 @llvm.x86.rdtsc()
define amdgpu_kernel void @k(ptr addrspace(1) %p) {
  %x = call i64 @llvm.x86.rdtsc()
  store i64 %x, ptr addrspace(1) %p
  ret void
}
"""
UNIFORM = "amdgpu_kernel", AMD, {"cpu": "gfx90a"}


def asked(text: str, triple: str = AMD, machine: dict | None = None) -> str:
    machine = {"cpu": "gfx90a"} if machine is None else machine
    request = {"triple": triple, "level": 2, "machine": machine, "kinds": ["asm"], "library": None}
    return process.code(request, [[text]], "kernel `k`")["asm"].decode()


@pytest.fixture(autouse=True)
def no_children():
    process.end_idle()
    yield
    process.end_idle()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (EXITS, "exit status 1: .*illegal VGPR to SGPR copy"),
        (ABORTS, f"(?s)signal {int(signal.SIGABRT)}: .*Cannot select"),
    ],
)
def test_where_llvm_ends_its_process_this_one_gets_an_error(text, why):
    with pytest.raises(InternalError, match="LLVM made no code of kernel `k`") as e:
        asked(text)
    assert e.match(why)
    assert "k:" in asked(TEXT.format(kind="amdgpu_kernel", name="k", value=3))


def test_a_child_serves_every_target_and_stays():
    numbers = []
    for kind, triple, machine in (
        UNIFORM,
        ("ptx_kernel", NVIDIA, {"cpu": "sm_80"}),
        ("", ARM, {"cpu": "cortex-a76"}),
    ):
        assert "written" in asked(TEXT.format(kind=kind, name="written", value=7), triple, machine)
        numbers += [c.process.pid for c in process._idle]
    assert len(numbers) == 3
    assert len(set(numbers)) == 1


def test_a_text_that_llvm_refuses_does_not_end_the_child():
    process.warm()
    (before,) = process._idle
    with pytest.raises(InternalError, match=r"does not parse: (?s:.*)expected top-level entity"):
        asked("nonsense")
    assert process._idle == [before]
    assert before.is_there()


def test_a_child_that_was_killed_while_it_waited_is_replaced():
    process.warm()
    (before,) = process._idle
    os.kill(before.process.pid, signal.SIGKILL)
    assert "k:" in asked(TEXT.format(kind="amdgpu_kernel", name="k", value=5))
    assert process._idle[0] is not before


def test_a_child_that_dies_of_an_earlier_request_is_asked_again(monkeypatch):
    process.warm()
    (before,) = process._idle
    monkeypatch.setattr(before, "_answer", lambda sent: None)
    assert "k:" in asked(TEXT.format(kind="amdgpu_kernel", name="k", value=5))


def test_llvm_that_does_not_come_back_is_stopped(monkeypatch):
    process.warm()
    (before,) = process._idle
    monkeypatch.setattr(process, "MOST_LLVM_SECONDS", 0.3)
    monkeypatch.setattr(before, "_answer", lambda sent: before.process.wait() and None)
    with pytest.raises(InternalError, match=r"it was stopped after 0.3 s"):
        asked(TEXT.format(kind="amdgpu_kernel", name="k", value=5))
    assert not before.is_there()


def test_an_interrupt_of_the_wait_ends_the_child(monkeypatch):
    process.warm()
    (before,) = process._idle

    def interrupted(sent):
        raise KeyboardInterrupt

    monkeypatch.setattr(before, "_answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        asked(TEXT.format(kind="amdgpu_kernel", name="k", value=5))
    assert not before.is_there()
    assert not process._idle


def test_a_child_that_nobody_asks_ends(monkeypatch, tmp_path):
    program = tmp_path / "child.py"
    program.write_text(
        pathlib.Path(child.__file__).read_text().replace("IDLE_SECONDS = 60", "IDLE_SECONDS = 0.01")
    )
    monkeypatch.setattr(process, "CHILD", program)
    process.warm()
    (before,) = process._idle
    assert before.process.wait(timeout=20) == 0
    process.warm()
    assert process._idle[0] is not before


def test_threads_ask_children_of_their_own():
    found: dict[int, str] = {}

    def ask(n: int) -> None:
        found[n] = asked(TEXT.format(kind="amdgpu_kernel", name=f"kernel_{n}", value=n))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(f"kernel_{n}:" in found[n] for n in range(4))
    assert 1 <= len(process._idle) <= process.MOST_IDLE


def _in_fork(results) -> None:
    results.put(
        (len(process._idle), "k:" in asked(TEXT.format(kind="amdgpu_kernel", name="k", value=9)))
    )
    process.end_idle()


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_process_has_children_of_its_own():
    process.warm()
    (before,) = process._idle
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    forked = context.Process(target=_in_fork, args=(results,))
    forked.start()
    assert results.get() == (0, True)
    forked.join()
    assert process._idle == [before]
    assert before.is_there()
    assert "k:" in asked(TEXT.format(kind="amdgpu_kernel", name="k", value=9))
    assert process._idle == [before]


def test_a_program_that_embeds_python_says_which_one_runs_llvm(tmp_path):
    before = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable(str(tmp_path / "no_python"))
    try:
        with pytest.raises(
            TargetError, match=r"cannot be started\n.*no_python.*\n.*multiprocessing.set_executable"
        ):
            asked(TEXT.format(kind="amdgpu_kernel", name="k", value=9))
    finally:
        multiprocessing.set_executable(before)


def test_children_end_with_their_pipes():
    process.warm()
    (before,) = process._idle
    process.end_idle()
    deadline = time.monotonic() + 10
    while before.is_there() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert before.process.returncode == 0


def test_without_llvmlite_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(process.importlib.util, "find_spec", lambda name: None)
    process.warm()  # asks for nothing
    assert not process._idle
    with pytest.raises(
        TargetError,
        match="llvmlite is not installed\n  why  it makes the code of tests\n  try  pip install x",
    ):
        process.require_llvmlite("tests", "pip install x")


# The mask is a constant after LLVM's passes alone.
ONE_LANE = """declare void @llvm.masked.store.v16i16.p0(<16 x i16>, ptr, <16 x i1>)
define void @pbk_main(<16 x i32> %x, ptr %p) #0 {{
  %n = add i32 {lanes}, 0
  %one = insertelement <16 x i32> poison, i32 %n, i64 0
  %all = shufflevector <16 x i32> %one, <16 x i32> poison, <16 x i32> zeroinitializer
  %mask = icmp {order} <16 x i32> <i32 0, i32 1, i32 2, i32 3, i32 4, i32 5, i32 6, i32 7,
    i32 8, i32 9, i32 10, i32 11, i32 12, i32 13, i32 14, i32 15>, %all
  %high = lshr <16 x i32> %x, splat (i32 16)
  %v = trunc <16 x i32> %high to <16 x i16>
  call void @llvm.masked.store.v16i16.p0(<16 x i16> %v, ptr align 8 %p, <16 x i1> %mask)
  ret void
}}
attributes #0 = {{ "target-cpu"="x86-64-v4" }}
"""


@pytest.mark.parametrize(
    ("lanes", "order", "stored"),
    [
        (1, "ult", "store i16 %{name}, ptr %{name}_at, align 8"),
        (3, "eq", "store i16 %{name}, ptr %{name}_at, align 2"),
        (4, "eq", "store i16 %{name}, ptr %{name}_at, align 8"),
        (3, "ult", None),
    ],
)
def test_a_masked_store_of_one_truncated_integer_writes_that_integer(lanes, order, stored):
    """LLVM 22 would write what was truncated, over what follows."""
    request = {
        "triple": "x86_64-unknown-linux-gnu",
        "level": 2,
        "machine": {"cpu": "x86-64", "features": ""},
        "kinds": ["llvm", "asm"],
        "library": {"scalar": [[True]], "names": ["f"], "keep": ["f"]},
    }
    made = process.code(request, [[ONE_LANE.format(lanes=lanes, order=order)]], "a library")
    (name,) = re.findall(r"%(pbk_lane_\d+) =", made["llvm"].decode()) or [None]
    stores = re.findall(r"^\t(\w+)\t.*\(%rdi\)(?: {%k\d})?$", made["asm"].decode(), re.MULTILINE)
    assert stores in ([["vpmovdw"]] if stored is None else [["movw"], ["vpextrw"]])
    assert (name is None) == (stored is None)
    assert name is None or stored.format(name=name) in made["llvm"].decode()
