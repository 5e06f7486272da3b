"""JAX's own tests with `pbkern.jit` in the place of `jax.jit`: python scripts/jax_tests.py CHECKOUT [--count 600] [--seed 0].

CHECKOUT is a clone of JAX's repository at the version that is installed (`git checkout jax-v0.10.2`). A sample of its tests of
lax, numpy, nn, control flow and scipy runs; a failure that `jax.jit` shares is none of ours and is left out. Failures inside
the compiler are errors. Exit status: 0 if none failed.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys

FILES = (
    "lax_test",
    "lax_numpy_test",
    "lax_numpy_operators_test",
    "lax_numpy_reducers_test",
    "lax_numpy_indexing_test",
    "lax_numpy_einsum_test",
    "lax_numpy_ufuncs_test",
    "nn_test",
    "lax_control_flow_test",
    "lax_scipy_test",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=pathlib.Path)
    parser.add_argument("--count", type=int, default=600, help="tests to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=int, default=120, help="limit for one test")
    options, rest = parser.parse_known_args()
    files = [
        str(p) for n in FILES if (p := options.checkout.resolve() / "tests" / f"{n}.py").exists()
    ]
    if not files:
        parser.error(
            f"{options.checkout} has no tests/lax_test.py: give a clone of JAX's repository"
        )
    here = pathlib.Path(__file__).resolve().parent
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)]),
        "PBKERN_FALLBACK": "0",
        "PBKERN_CACHE": "0",
        "JAX_NUM_GENERATED_CASES": "4",
        "JAX_PLATFORMS": "cpu",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "jax_tests_plugin",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        "--rootdir",
        str(options.checkout),
        "--timeout",
        str(options.seconds),
        "--draw",
        str(options.count),
        "--seed",
        str(options.seed),
        *rest,
        *files,
    ]
    return subprocess.run(command, env=env, cwd=options.checkout).returncode


if __name__ == "__main__":
    sys.exit(main())
