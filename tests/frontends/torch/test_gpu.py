"""Functions of PyTorch for GPUs: programs get addresses and a stream of Torch's. There is no device: the simulator works on the
tensors of the CPU, and libraries stand in for the driver."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import pbkern
from pbkern.api import torch_calls
from pbkern.api.direct_plan import DirectPlan
from pbkern.core import config
from pbkern.core.options import CompileOptions
from pbkern.errors import OptionError, TargetError, UnsupportedOp
from pbkern.frontends.torch import graphs, memory
from pbkern.frontends.torch.capture import capture
from pbkern.targets.nvgpu import driver, ptxas
from tests.nvgpu.test_drivers import Cuda

# Results are compared with those of float32.
GPU = {"target": "nvgpu", "mm_conv_precision_mode": "fp32"}


@pytest.fixture
def simulator():
    with config.override(gpu_driver="simulator"):
        yield


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(12, 20), torch.nn.Linear(20, 3)

    def forward(self, x):
        return torch.softmax(self.outer(torch.nn.functional.gelu(self.inner(x))), -1)


def test_a_model_and_its_gradients(simulator, monkeypatch):
    """Nothing goes through JAX's arrays."""
    monkeypatch.setattr(memory.CudaMemory, "to_jax", None)
    torch.manual_seed(0)
    model, x = Model(), torch.randn(7, 12)
    fast = pbkern.polyblocks_jit_torch(model, compile_options=GPU)
    weights = torch.randn(7, 3)
    found = []
    for f in (fast, model):
        model.zero_grad()
        result = f(x)
        (result * weights).sum().backward()
        found.append([result.detach(), *(p.grad.clone() for p in model.parameters())])
    for got, want in zip(*found):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_views_that_start_anywhere_and_what_runs_in_torch(simulator):
    """Vector loads need addresses that XLA's arrays have, and views of tensors do not."""

    def f(x, y):
        values, _ = torch.linalg.eigh(y @ y.T)  # an operator that the table lacks
        return (x * 2 + 1).sum(-1), torch.cumsum(values, 0)

    whole, y = torch.randn(4 * 33 + 3), torch.randn(5, 5)
    fast = pbkern.polyblocks_jit_torch(f, compile_options=GPU)
    for start in range(4):
        x = whole[start : start + 4 * 32].view(4, 32)
        for got, want in zip(fast(x, y), f(x, y)):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_random_numbers_and_integers(simulator):
    f = pbkern.polyblocks_jit_torch(
        lambda x: (torch.nn.functional.dropout(x, 0.5), x.argmax(-1)), compile_options=GPU
    )
    x = torch.ones(40, 50)
    x[:, 7] = 3
    dropped, largest = f(x)
    assert 0.4 < (dropped == 0).double().mean() < 0.6
    assert bool((largest == 7).all())


def test_an_error_of_a_launch_is_an_exception_of_the_call(simulator, monkeypatch):
    def fails(*_, **__):
        raise pbkern.errors.SimulationError("threads race in kernel", kind="race")

    f = pbkern.polyblocks_jit_torch(lambda x: x * 1.375, compile_options=GPU)
    x = torch.ones(30)
    torch.testing.assert_close(f(x), x * 1.375)
    monkeypatch.setattr(driver, "simulate_ptx", fails)
    with pytest.raises(TargetError, match=r"kernel `k0_.*` failed: threads race in kernel"):
        f(x)
    monkeypatch.undo()
    with config.override(gpu_driver="simulator"):
        torch.testing.assert_close(f(x), x * 1.375)


class Streams:
    """Torch's device in the place of CudaDevice: notes when a thread is on it."""

    def __init__(self, cuda, number: int):
        self.cuda, self.number, self.log = cuda, number, []

    def entered(self):
        return self

    def __enter__(self):
        self.cuda.current(self.number)
        self.log.append("on")

    def __exit__(self, *_):
        self.cuda.current(-1)
        self.log.append("off")

    def stream(self) -> int:
        self.log.append("stream")
        return 0x1230 + self.number


def test_addresses_and_the_current_stream_go_to_the_driver(tmp_path, monkeypatch):
    """They are those of the device that the tensors are on, whichever the thread was on before."""
    monkeypatch.setattr(ptxas, "find", lambda: None)
    cuda = Cuda(tmp_path)
    cuda.devices("9.0", "9.0", "9.0")
    cuda.current(-1)
    monkeypatch.setattr(driver, "driver", lambda name: cuda.driver)
    module = torch.fx.symbolic_trace(
        lambda x, y: (torch.ops.aten.mul.Tensor(x, y), torch.ops.aten.sum.dim_IntList(x, [1]))
    )
    x, y = torch.randn(6, 40), torch.randn(6, 40)
    torch.fx.passes.fake_tensor_prop.FakeTensorProp(module).propagate(x, y)
    options = CompileOptions(target="nvgpu", device="sm_90a")
    found = capture(module, [x, y])
    for number in (2, 1):
        device = Streams(cuda, number)
        with config.override(gpu_driver=None):
            plan = DirectPlan(
                found.jaxpr, "f", options, memory.CudaMemory(torch.device("cpu"), device)
            )
        product, total = plan([x, y])
        torch.testing.assert_close(product, x * y)
        torch.testing.assert_close(total, x.sum(1))
        assert {(d, s) for d, _, s in cuda.launches} == {(number, 0x1230 + number)}
        assert device.log == ["on", "stream", "off"]
        cuda.launches.clear()
    cuda.break_device(1, 700)
    with pytest.raises(
        TargetError, match="failed on device 1 while it ran: CUDA_ERROR_ILLEGAL_ADDRESS"
    ):
        plan([x, y])


def test_torchs_devices_and_streams(monkeypatch):
    """Torch is asked for both where it has CUDA."""
    asked = []

    class OnDevice:
        def __init__(self, where):
            asked.append(where)

    class Stream:
        cuda_stream = 0xF0

    monkeypatch.setattr(torch.cuda, "device", OnDevice)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda where: asked.append(where) or Stream())
    device = memory.CudaDevice(torch.device("cuda:3"))
    assert isinstance(device.entered(), OnDevice)
    assert device.stream() == 0xF0
    assert asked == [torch.device("cuda:3")] * 2
    found = torch_calls._memory("nvgpu", torch.device("cuda:3"))
    assert isinstance(found.device, memory.CudaDevice)
    assert found.where == torch.device("cuda:3")
    with FakeTensorMode():
        assert found.empty((2, 0, 3), np.dtype("f4"))().device == torch.device("cuda:3")


def test_tensors_on_other_devices_are_refused():
    f = pbkern.polyblocks_jit_torch(lambda x: x + 1, compile_options=GPU)
    with (
        config.override(gpu_driver=None),
        pytest.raises(UnsupportedOp, match="argument 0 is on device `cpu`") as e,
    ):
        f(torch.ones(3))
    assert "target 'nvgpu'" in str(e.value)
    assert e.value.hint == "x.cuda()"
    with FakeTensorMode():
        first, second = torch.empty(3, device="cuda:0"), torch.empty(3, device="cuda:1")
    compile_graph = graphs.backend(lambda *_: None, lambda n: True, [], False, "cuda")
    with pytest.raises(
        UnsupportedOp, match="graph 0 has inputs on several devices\n  why  cuda:0, cuda:1"
    ):
        compile_graph(torch.fx.symbolic_trace(lambda x, y: x), [first, second])
    with pytest.raises(UnsupportedOp, match="input 0 of graph 0 is on device `cuda:0`"):
        graphs.backend(lambda *_: None, lambda n: True, [], False)(
            torch.fx.symbolic_trace(lambda x: x), [first]
        )
    with pytest.raises(OptionError, match="not compiled for target 'amdgpu'"):
        pbkern.polyblocks_jit_torch(lambda x: x, compile_options={"target": "amdgpu"})


def test_what_is_left_to_xla_needs_its_devices(monkeypatch):
    def refuses(array):
        raise RuntimeError("Unknown backend cuda")

    monkeypatch.setattr(memory.jax.dlpack, "from_dlpack", refuses)
    with pytest.raises(
        TargetError, match="JAX does not take tensors of `cuda:0`\n  why  Unknown backend cuda"
    ):
        memory.CudaMemory(torch.device("cuda:0"), memory.SimulatedDevice()).to_jax(torch.ones(2))


def test_operators_of_a_graph_are_compiled_where_its_inputs_are():
    """A tensor of the CPU among those of a device: that operator runs in Torch, as it does without pbkern."""
    from pbkern.frontends.torch.capture import unsupported

    module = torch.fx.symbolic_trace(
        lambda x, y: torch.ops.aten.add.Tensor(torch.ops.aten.mul.Tensor(x, x), y)
    )
    with FakeTensorMode() as mode:
        x, y = torch.empty(3, device="cuda:1"), torch.empty(())
    torch.fx.passes.fake_tensor_prop.FakeTensorProp(module, mode).propagate_dont_convert_inputs(
        x, y
    )
    found = unsupported(module.graph, torch.device("cuda:1"))
    assert [n.target for n in found] == [torch.ops.aten.add.Tensor]
