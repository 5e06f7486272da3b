"""An image is blurred by two convolutions, first in x, then in y; both become one kernel."""

import jax
import jax.numpy as jnp
import numpy as np
from compare import compare

from pbkern import polyblocks_jit_jax

height, width = 1080, 1920


@polyblocks_jit_jax(compile_options={"target": "cpu"})
def blur_x_blur_y(img):
    # We are doing a regular image convolution in the X direction and then in the Y direction.
    kernel = jnp.array([0.0625, 0.25, 0.375, 0.25, 0.0625], dtype=jnp.float32)
    img_reshaped = img.reshape(3, 1, height, width)
    # The output is two short at each end.
    blurx = jax.lax.conv_general_dilated(img_reshaped, kernel.reshape(1, 1, 1, 5), (1, 1), "VALID")
    blury = jax.lax.conv_general_dilated(blurx, kernel.reshape(1, 1, 5, 1), (1, 1), "VALID")
    return blury.reshape(3, height - 4, width - 4)


if __name__ == "__main__":
    img = jax.device_put(np.random.default_rng(0).random((3, height, width), np.float32))
    compare(blur_x_blur_y, img, calls=5)
