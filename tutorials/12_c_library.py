"""Unsharp mask as a C library: from C, and from NumPy without JAX.

Needs `pip install 'pbkern[aot]'`, which brings llvmlite, and a C compiler.
"""

import importlib.util
import pathlib
import shutil
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from pbkern import polyblocks_aot_jax

if importlib.util.find_spec("llvmlite") is None or shutil.which("cc") is None:
    print("llvmlite or a C compiler is not installed: nothing to see")
    sys.exit()


def unsharp_mask(img):
    """float32[h, w, 3] -> float32[h - 4, w - 4, 3]"""
    taps = jnp.array([1, 4, 6, 4, 1], jnp.float32) / 16
    down = sum(img[i : img.shape[0] - 4 + i] * taps[i] for i in range(5))
    blurred = sum(down[:, i : down.shape[1] - 4 + i] * taps[i] for i in range(5))
    return img[2:-2, 2:-2] * 1.5 - blurred * 0.5


# The call compiles for the types of its arguments. A type is enough: nothing is run.

folder = pathlib.Path(tempfile.mkdtemp())
image = jax.ShapeDtypeStruct((240, 320, 3), jnp.float32)
library = polyblocks_aot_jax(
    compile_options={"aot_name": "unsharp_mask"}, output=folder, emit=["obj", "header", "shared"]
)(unsharp_mask)(image)
print(library.header.split('extern "C" {')[1].split("#define")[0])

# A C program includes the header and links the object file; OpenMP brings the threads.

(folder / "main.c").write_text("""
#include <stdio.h>
#include <stdlib.h>
#include "unsharp_mask.h"

int main(void) {
  float *img = malloc(240 * 320 * 3 * sizeof(float)), *out = malloc(236 * 316 * 3 * sizeof(float));
  for (int k = 0; k < 240 * 320 * 3; k++) img[k] = (float)(k % 7);
  unsharp_mask(img, out);
  printf("%.4f %.4f %.4f\\n", out[0], out[1], out[2]);
  return unsharp_mask_try(NULL, out) == UNSHARP_MASK_NULL_POINTER ? 0 : 1;
}
""")
subprocess.run(
    ["cc", "-O2", "main.c", "unsharp_mask.o", "-lgomp", "-o", "main"], cwd=folder, check=True
)
from_c = subprocess.run([folder / "main"], capture_output=True, text=True, check=True).stdout
print("from C:   ", from_c, end="")

# From NumPy: nothing is converted or copied, and what does not fit is refused.

call = library.load()
img = (np.arange(240 * 320 * 3, dtype=np.float32) % 7).reshape(240, 320, 3)
out = call(img)
print("from NumPy:", *(f"{x:.4f}" for x in out.ravel()[:3]))
np.testing.assert_allclose([float(x) for x in from_c.split()], out.ravel()[:3], atol=1e-4)
np.testing.assert_allclose(out, unsharp_mask(jnp.asarray(img)), rtol=1e-5, atol=1e-5)
try:
    call(img.astype(np.float64))
except ValueError as e:
    print(e)

# Weights need not be arguments: here they are a file beside the library, which C maps into memory once. Fields of a struct
# (weights="arguments") and data of the object ("embed") are the other ways; PyTorch's parameters are weights by themselves.


def mlp(params, x):
    return jnp.tanh(x @ params["w"] + params["b"])


rng = np.random.default_rng(0)
params = {
    "w": rng.normal(size=(3, 2)).astype(np.float32),
    "b": rng.normal(size=2).astype(np.float32),
}
x = np.array([[0.1, 0.2, 0.3]], np.float32)
options = {"aot_name": "mlp", "weights": "file", "weights_argnums": 0, "openmp": False}
library = polyblocks_aot_jax(compile_options=options, output=folder)(mlp)(params, x)
(folder / "mlp_main.c").write_text("""
#include <stdio.h>
#include "mlp.h"

int main(void) {
  float x[3] = {0.1f, 0.2f, 0.3f}, out[2];
  int code = mlp_load("mlp.weights");
  if (code) {
    fprintf(stderr, "%s\\n", mlp_message(code));
    return code;
  }
  mlp(x, out);
  printf("%.6f %.6f\\n", out[0], out[1]);
  return 0;
}
""")
subprocess.run(["cc", "-O2", "mlp_main.c", "mlp.o", "-o", "mlp_main"], cwd=folder, check=True)
from_c = subprocess.run(
    [folder / "mlp_main"], cwd=folder, capture_output=True, text=True, check=True
).stdout
print("mlp from C:", from_c, end="")
np.testing.assert_allclose([float(word) for word in from_c.split()], mlp(params, x)[0], atol=1e-5)

# For an older processor, for a small computer, for one without threads: no other compiler is needed for the object.

for device in ("x86-64-v3", "x86-64-v3,x86-64-v4", "neoverse-n1", "apple-m1"):
    options = {
        "aot_name": "unsharp_mask",
        "device": device,
        "openmp": False,
        "user_device_memory": True,
    }
    made = polyblocks_aot_jax(compile_options=options, output=folder)(unsharp_mask)(image)
    print(
        f"{device:20} {made.paths['obj'].stat().st_size:6} bytes, memory of a call: {made.metadata['memory_bytes']} bytes"
    )
