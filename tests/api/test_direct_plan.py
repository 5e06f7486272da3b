"""Programs called with the addresses of tensors: on threads, from threads, in forked processes, and what XLA keeps."""

import contextlib
import os
import pathlib
import threading
import time

import pytest

torch = pytest.importorskip("torch")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from pbkern.api.direct_plan import DirectPlan  # noqa: E402
from pbkern.core.options import CompileOptions  # noqa: E402
from pbkern.frontends.torch.memory import TorchMemory  # noqa: E402
from tests.cores import of_several_cores  # noqa: E402


def plan_of(f, *tensors, **options):
    with jax.enable_x64(True):
        jaxpr = jax.make_jaxpr(f)(*[t.numpy() for t in tensors])
    return DirectPlan(jaxpr, getattr(f, "__name__", "f"), CompileOptions(**options), TorchMemory())


def row_sums(x):
    return [jnp.exp(x).sum(1)]


@pytest.fixture(scope="module")
def summing():
    x = torch.rand(512, 1111)
    return plan_of(row_sums, x), x


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_any_number_of_threads(summing, count):
    plan, x = summing
    torch.set_num_threads(count)
    torch.testing.assert_close(plan([x])[0], x.exp().sum(1))


@of_several_cores
def test_as_many_threads_as_torch_has():
    """Each calling thread has helpers of its own in OpenMP: those that a call starts are one fewer than Torch's threads."""
    x = torch.rand(512, 1111)
    plan = plan_of(row_sums, x)
    plan([x])

    def started(count):
        torch.set_num_threads(count)
        found = []

        def call():
            name = f"calls-{count}"  # which those inherit that a thread starts
            pathlib.Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
            plan([x])
            names = []
            for task in pathlib.Path("/proc/self/task").iterdir():
                with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it has ended
                    names.append((task / "comm").read_text().strip())
            found.append(names.count(name) - 1)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return found[0]

    assert started(1) == 0
    assert started(2) == 1


def test_several_threads_call_at_once(summing):
    plan, _ = summing
    inputs = [torch.rand(512, 1111) + k for k in range(4)]
    wrong = []

    def work(x):
        expected = x.exp().sum(1)
        for _ in range(30):
            if not torch.allclose(plan([x])[0], expected):
                wrong.append(x)

    workers = [threading.Thread(target=work, args=(x,)) for x in inputs]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert not wrong


def test_a_forked_process_calls(summing):
    """OpenMP's threads stay behind: a call that waited for them would not come back."""
    plan, x = summing
    torch.set_num_threads(2)
    expected = plan([x])[0]
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(plan([x])[0], expected) else 1)
    for _ in range(200):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.05)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the call in the forked process did not come back")
    assert status == 0
    torch.testing.assert_close(plan([x])[0], expected)


def test_the_interpreter_runs_during_a_call():
    x = torch.rand(1024, 1024)
    plan = plan_of(lambda x: [jnp.tanh(x)], x, num_iters=40)
    plan([x])
    torch.set_num_threads(1)
    during, running = [], threading.Event()

    def call():
        running.set()
        start = time.perf_counter()
        plan([x])
        during.append((start, time.perf_counter()))

    thread = threading.Thread(target=call)
    thread.start()
    running.wait()
    ticks = []
    while thread.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0.001)
    thread.join()
    ((start, end),) = during
    assert sum(start < t < end for t in ticks) > 5, (end - start, len(ticks))


def test_inputs_of_any_strides_and_places():
    x = torch.rand(40, 31)
    plan = plan_of(lambda x: [x * 2 + 1], torch.rand(31, 40))
    torch.testing.assert_close(plan([x.t()])[0], x.t() * 2 + 1)
    torch.testing.assert_close(plan([torch.rand(1).expand(31, 40)])[0].unique().numel(), 1)
    memory = torch.rand(31 * 40 + 3)
    for offset in range(4):  # starts at no cache line
        y = memory[offset : offset + 31 * 40].view(31, 40)
        torch.testing.assert_close(plan([y])[0], y * 2 + 1)
    z = torch.complex(x, x).conj().imag.t()
    assert z.is_neg()
    torch.testing.assert_close(plan([z])[0], z * 2 + 1)


def test_results_that_are_inputs_constants_or_the_same_are_copies():
    x = torch.rand(5)
    plan = plan_of(lambda x: [x, x + 1, np.float32(7), x, jnp.arange(3)], x)
    made = plan([x])
    for m, e in zip(made, [x, x + 1, torch.tensor(7.0), x, torch.arange(3)]):
        torch.testing.assert_close(m, e)
    assert len({t.data_ptr() for t in (x, *made)}) == 6


def test_what_xla_keeps_lies_between_programs():
    x = torch.rand(40, 40) + 40 * torch.eye(40)  # smaller inverses are kernels
    plan = plan_of(lambda x: [jnp.linalg.inv(x * 2) + 1], x)
    assert plan.build.fused.left_to_xla()
    torch.testing.assert_close(plan([x])[0], torch.linalg.inv(x * 2) + 1)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (3, 0, 2)])
def test_arrays_of_one_and_of_no_elements(shape):
    x = torch.rand(shape)
    plan = plan_of(lambda x: [x * 2, x.sum()], x)
    torch.testing.assert_close(plan([x]), [x * 2, x.sum()])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers(dtype):
    x = torch.randn(6, 7, dtype=dtype)
    plan = plan_of(lambda x: [x * x + 1, jnp.abs(x)], x)
    torch.testing.assert_close(plan([x]), [x * x + 1, x.abs()])
    torch.testing.assert_close(plan([x.conj()])[0], x.conj() ** 2 + 1)


def test_a_bfloat16_constant():
    x = torch.rand(5, dtype=torch.float32)
    table = np.asarray(jnp.arange(5, dtype=jnp.bfloat16))
    (made,) = plan_of(lambda x: [jnp.asarray(table)], x)([x])
    assert made.dtype is torch.bfloat16
    torch.testing.assert_close(made.float(), torch.arange(5.0))
