"""Traces of launches of PyTorch's functions: those that are compiled already, forward and backward."""

import gc
import threading

import numpy as np
import pytest

import pbkern
from pbkern.api import direct_plan
from tests.api.test_profile import check, names

torch = pytest.importorskip("torch")


def graph_kernels(explanation):
    return {
        stage.name
        for graph in explanation.graphs
        for kernel in graph.kernels()
        for stage in kernel.stages
    }


def test_a_function_and_its_gradient():
    f = pbkern.polyblocks_jit_torch(lambda x, w: torch.softmax(x @ w, 1).square().sum())
    x, w = torch.randn(64, 48), torch.randn(48, 32, requires_grad=True)

    def step():
        w.grad = None
        f(x, w).backward()
        return w.grad

    want = step().clone()
    trace = pbkern.profile(step, calls=2)
    check(trace, calls=2)
    assert names(trace, "kernel") == graph_kernels(f.explain(x, w))
    assert names(trace, "program") == {"graph0_forward", "graph0_backward"}
    costs = [one.args for one in trace.slices if one.kind == "kernel"]
    assert all("grid" in args for args in costs)
    assert any(args.get("predicted_flops") for args in costs)
    assert torch.equal(step(), want)


def test_a_module_that_was_not_called_before():
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    fast, x = pbkern.polyblocks_jit_torch(model), torch.randn(16, 32)
    with torch.no_grad():
        trace = pbkern.profile(fast, x)
        check(trace)
        assert names(trace, "kernel") == graph_kernels(fast.explain(x))
        torch.testing.assert_close(fast(x), model(x))


def test_functions_of_torch_compile():
    f = torch.compile(lambda x: torch.softmax(x * 2, 1), backend="pbkern")
    x = torch.randn(40, 50)
    want = f(x)
    trace = pbkern.profile(f, x)
    check(trace)
    assert len(names(trace, "kernel")) == 1
    assert torch.equal(f(x), want)


def test_the_usual_programs_run_afterwards():
    f, x = pbkern.polyblocks_jit_torch(lambda x: torch.cumsum(x.exp(), 1)), torch.randn(20, 30)
    want = f(x)
    (plan,) = f.graphs[0].compiled
    (redirection,) = plan._redirections
    assert redirection.place.value == redirection.usual
    with direct_plan.recorded():
        assert torch.equal(f(x), want)
        assert redirection.place.value != redirection.usual
    assert redirection.place.value == redirection.usual

    def failing():
        f(x)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pbkern.profile(failing)
    assert redirection.place.value == redirection.usual
    assert torch.equal(f(x), want)


def test_a_program_that_cannot_be_recorded_runs_and_says_so(monkeypatch):
    f, x = pbkern.polyblocks_jit_torch(lambda x: x.sin() + 1), torch.randn(20, 30)
    want = f(x)

    def fails(*_, **__):
        raise RuntimeError("no compiler")

    with monkeypatch.context() as patch:
        patch.setattr(direct_plan, "recorded_programs", fails)
        with pytest.raises(RuntimeError, match="no compiler"), direct_plan.recorded():
            assert torch.equal(f(x), want)
    check(pbkern.profile(f, x))


def test_calls_of_other_threads_go_on():
    f, x = pbkern.polyblocks_jit_torch(lambda x: torch.softmax(x, 1)), torch.randn(64, 64)
    want, results, stop = f(x), [], threading.Event()

    def work():
        while not stop.is_set():
            results.append(f(x))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(5):
            assert names(pbkern.profile(f, x), "kernel") == graph_kernels(f.explain(x))
    finally:
        stop.set()
        thread.join()
    assert all(torch.equal(result, want) for result in results)


def test_plans_go_with_their_functions():
    def made():
        f = pbkern.polyblocks_jit_torch(lambda x: x * 3 - 1)
        pbkern.profile(f, torch.ones(10))

    made()
    torch._dynamo.reset()
    gc.collect()
    before = len(direct_plan._plans)
    for _ in range(3):
        made()
    torch._dynamo.reset()
    gc.collect()
    assert len(direct_plan._plans) <= before


def test_complex_numbers_which_go_through_jax():
    f = pbkern.polyblocks_jit_torch(lambda x: (x * x.conj()).real.sum(0))
    x = torch.randn(8, 8, dtype=torch.complex64)
    trace = pbkern.profile(f, x)
    check(trace)
    assert names(trace, "kernel")
    np.testing.assert_allclose(f(x), (x.abs() ** 2).sum(0), rtol=1e-5)
