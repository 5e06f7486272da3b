"""A Flax module: convolution, bias and relu become one kernel."""

import jax
import numpy as np
from compare import compare

from pbkern import polyblocks_jit_jax

try:
    from flax import linen as nn
except ImportError as error:
    raise SystemExit(f"{error}: this example needs Flax, pip install 'pbkern[demo]'") from None


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(features=64, kernel_size=(3, 3))(x)
        return nn.relu(x)


cnn = CNN()


# Model parameters are passed as arguments of the function that is compiled. Taken from the enclosing scope, they would
# be constants of the program: it would have to be compiled again whenever they change.
@polyblocks_jit_jax(compile_options={"target": "cpu"})
def ConvBiasRelu(variables, img):
    return cnn.apply(variables, img)


if __name__ == "__main__":
    img = jax.device_put(np.random.default_rng(0).standard_normal((8, 56, 56, 64), np.float32))
    variables = cnn.init(jax.random.key(0), img)
    compare(ConvBiasRelu, variables, img)
