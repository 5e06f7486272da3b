"""pl.kernel and pl.core_map: each core of the mesh is a program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import pbkern.pallas
from pbkern.core.errors import UnsupportedOp

F32 = jnp.float32
X = np.random.default_rng(0).standard_normal((32, 128)).astype("f4")
STRUCT = jax.ShapeDtypeStruct(X.shape, F32)


def mesh(cores):
    return pltpu.create_tensorcore_mesh("core", num_cores=cores)


def my_rows(ref, cores):
    rows = ref.shape[0] // cores
    return ref.at[pl.ds(jax.lax.axis_index("core") * rows, rows)]


@pytest.mark.parametrize("cores", [1, 2, 4])
@pytest.mark.parametrize("params", [None, pltpu.CompilerParams(vmem_limit_bytes=2**20)])
def test_kernels_of_several_cores(cores, params):
    def body(x_ref, o_ref, buffer):
        pltpu.sync_copy(my_rows(x_ref, cores), buffer)
        buffer[...] = buffer[...] * 2
        pltpu.sync_copy(buffer, my_rows(o_ref, cores))

    scratch = [pltpu.VMEM((32 // cores, 128), F32)]
    f = pl.kernel(
        body, out_type=STRUCT, mesh=mesh(cores), scratch_types=scratch, compiler_params=params
    )
    np.testing.assert_array_equal(jax.jit(f)(X), X * 2)
    np.testing.assert_array_equal(f(X), X * 2)


def test_a_mesh_that_asks_the_device_has_one_core():
    def body(x_ref, o_ref):
        pltpu.sync_copy(x_ref, o_ref)

    asked = pltpu.create_tensorcore_mesh("core")
    assert asked.shape == {"core": 1}
    assert mesh(2).shape == {"core": 2}
    np.testing.assert_array_equal(pl.kernel(body, out_type=STRUCT, mesh=asked)(X), X)
    pbkern.pallas.uninstall()
    try:
        with pytest.raises(AttributeError):
            pltpu.create_tensorcore_mesh("core")
    finally:
        pbkern.pallas.install()


@pytest.mark.skipif(not hasattr(pltpu, "TensorCoreMesh"), reason="public from jax 0.11.2 on")
def test_a_mesh_made_without_a_number_of_cores_has_one():
    def body(x_ref, o_ref):
        pltpu.sync_copy(x_ref, o_ref)

    kind = pltpu.TensorCoreMesh
    assert kind(axis_name="rows").shape == {"rows": 1}
    assert kind(axis_name="rows", num_cores=3).shape == {"rows": 3}
    np.testing.assert_array_equal(
        pl.kernel(body, out_type=STRUCT, mesh=kind(axis_name="rows"))(X), X
    )
    pbkern.pallas.uninstall()
    try:
        with pytest.raises(AttributeError):
            kind(axis_name="rows")
    finally:
        pbkern.pallas.install()


@pytest.mark.parametrize("cores", [1, 2])
def test_core_map_writes_to_the_arrays_it_reads(cores):
    @jax.jit
    def f(x, y):
        x, y = jax.new_ref(x), jax.new_ref(y)

        @pl.core_map(mesh(cores))
        def _():
            def inner(buffer):
                pltpu.sync_copy(my_rows(x, cores), buffer)
                buffer[...] = buffer[...] + 1
                pltpu.sync_copy(buffer, my_rows(x, cores))
                pltpu.sync_copy(my_rows(x, cores), my_rows(y, cores))

            pl.run_scoped(inner, pltpu.VMEM((32 // cores, 128), F32))

        return x[...], y[...]

    x, y = f(X, np.zeros_like(X))
    np.testing.assert_array_equal(x, X + 1)
    np.testing.assert_array_equal(y, X + 1)


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("shape", [(32, 256), (30, 200)])
def test_pipelines_divided_over_cores(cores, shape):
    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    def kernel(x_ref, o_ref):
        block = pl.BlockSpec((8, 128), lambda i, j: (i, j))
        pltpu.emit_pipeline(
            body, grid=(4, 2), in_specs=[block], out_specs=[block], core_axis_name="core",
            dimension_semantics=(pltpu.PARALLEL, pltpu.ARBITRARY),
        )(x_ref, o_ref)  # fmt: skip

    x = np.ones(shape, "f4")
    f = pl.kernel(
        kernel, out_type=jax.ShapeDtypeStruct(shape, F32), mesh=mesh(cores), scratch_types=[]
    )
    np.testing.assert_array_equal(f(x), 2)


def test_an_operand_that_a_call_gives_up_is_the_result():
    def kernel(x_ref, o_ref):
        pltpu.sync_copy(x_ref.at[pl.ds(0, 8)], x_ref.at[pl.ds(8, 8)])

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    f = pl.pallas_call(
        kernel,
        out_shape=STRUCT,
        in_specs=[anywhere],
        out_specs=anywhere,
        input_output_aliases={0: 0},
    )
    want = X.copy()
    want[8:16] = X[:8]
    np.testing.assert_array_equal(f(jnp.asarray(X)), want)


def test_cores_that_talk_to_one_another_are_refused():
    def signals(x_ref, o_ref, sem):
        pl.semaphore_signal(sem, device_id={"core": 1})

    f = pl.kernel(
        signals, out_type=STRUCT, mesh=mesh(2), scratch_types=[pltpu.SemaphoreType.REGULAR]
    )
    with pytest.raises(UnsupportedOp, match=r"another device or core[\s\S]*test_meshes.py"):
        f(X)

    def shares(x_ref, o_ref, memory):
        pltpu.sync_copy(x_ref, o_ref)

    g = pl.kernel(shares, out_type=STRUCT, mesh=mesh(2), scratch_types=[pltpu.HBM((8, 128), F32)])
    with pytest.raises(UnsupportedOp, match=r"cores share[\s\S]*test_meshes.py"):
        g(X)


def test_loops_and_pipelines_of_a_sparse_core():
    cores = plsc.VectorSubcoreMesh(
        core_axis_name="core", subcore_axis_name="subcore", num_cores=2, num_subcores=4
    )

    def body(x_ref, o_ref):
        @plsc.parallel_loop(0, 128, step=16)
        def _(k):
            o_ref[:, pl.ds(k, 16)] = x_ref[:, pl.ds(k, 16)] * 2

    def kernel(x_ref, o_ref):
        core = jax.lax.axis_index("core") * 4 + jax.lax.axis_index("subcore")
        block = pl.BlockSpec((2, 128), lambda i: (core * 2 + i, 0))
        pltpu.emit_pipeline(body, grid=(2,), in_specs=[block], out_specs=[block])(x_ref, o_ref)

    np.testing.assert_array_equal(
        pl.kernel(kernel, out_type=STRUCT, mesh=cores, scratch_types=[])(X), X * 2
    )


def test_operations_of_a_sparse_core_are_refused():
    cores = plsc.VectorSubcoreMesh(
        core_axis_name="core", subcore_axis_name="subcore", num_cores=1, num_subcores=1
    )

    def kernel(x_ref, o_ref):
        o_ref[0, :8] = plsc.load_gather(x_ref, [jnp.arange(8), jnp.zeros(8, jnp.int32)])

    with pytest.raises(UnsupportedOp, match=r"`gather` of a SparseCore[\s\S]*test_meshes.py"):
        pl.kernel(kernel, out_type=STRUCT, mesh=cores, scratch_types=[])(X)


def test_scalars_that_a_kernel_closes_over():
    @jax.jit
    def f(x, i):
        def body(x_ref, o_ref):
            pltpu.sync_copy(x_ref.at[pl.ds(i, 1)], o_ref.at[pl.ds(jax.lax.axis_index("core"), 1)])

        return pl.kernel(
            body, out_type=jax.ShapeDtypeStruct((2, 128), F32), mesh=mesh(2), scratch_types=[]
        )(x)

    for i in (0, 17):
        np.testing.assert_array_equal(f(X, i), X[[i, i]])
