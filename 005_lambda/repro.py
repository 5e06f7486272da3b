"""Rebuilds the kernels of `<lambda>`, runs each on random inputs and compares with the interpreter."""

import pathlib

import jax
import numpy as np

import pbkern

jax.config.update("jax_enable_x64", True)
for path in sorted(pathlib.Path(__file__).with_name("kernels").glob("*.py")):
    kernel = pbkern.rebuild(path.read_text())
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=t.shape).astype(t.dtype) for t in kernel.in_types]
    for got, want in zip(pbkern.call_kernel(kernel, *inputs), pbkern.interpret(kernel, *inputs)):
        far = np.max(np.abs(np.asarray(got).astype(complex) - want.astype(complex)), initial=0.0)
        print(f"{kernel.name}: largest difference {far:.3g}")
