"""Densities and samplers: numpyro, blackjax, distrax."""

import jax
import jax.numpy as jnp
from jax import lax

from .registry import program, waves


def regression(x, y=None):
    """A Bayesian regression with a hierarchy of scales, as a model of numpyro."""
    import numpyro
    from numpyro import distributions

    scale = numpyro.sample("scale", distributions.HalfCauchy(1.0))
    weights = numpyro.sample(
        "weights", distributions.Normal(0.0, scale).expand([x.shape[1]]).to_event(1)
    )
    degrees = numpyro.sample("degrees", distributions.Gamma(3.0, 0.5))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", distributions.StudentT(degrees, x @ weights, 0.7), obs=y)


def regression_data():
    x = waves(30, 4)
    return x, x @ jnp.array([0.5, -1.0, 0.2, 0.0]) + waves(30, scale=0.2, shift=2.0)


@program("numpyro")
def numpyro_log_density():
    from numpyro.infer.util import log_density

    def density(parameters, x, y):
        return log_density(regression, (x, y), {}, parameters)[0]

    return density, (
        {"scale": jnp.array(0.8), "weights": waves(4), "degrees": jnp.array(5.0)},
        *regression_data(),
    )


@program("numpyro", gradient=False)
def numpyro_nuts():
    from numpyro.infer import NUTS, init_to_value

    def sample(start, x, y):
        kernel = NUTS(regression, step_size=0.15, adapt_step_size=True, max_tree_depth=4,
                      init_strategy=init_to_value(values=start))  # fmt: skip
        state = kernel.init(jax.random.key(3), 2, None, (x, y), {})
        states = [state := kernel.sample(state, (x, y), {}) for _ in range(3)]
        return (
            states[-1].z,
            [s.accept_prob for s in states],
            [s.num_steps for s in states],
            states[-1].adapt_state.step_size,
        )

    return sample, (
        {"scale": jnp.array(0.8), "weights": waves(4), "degrees": jnp.array(5.0)},
        *regression_data(),
    )


@program("numpyro", "optax")
def numpyro_variational_step():
    import numpyro
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoMultivariateNormal

    guide = AutoMultivariateNormal(regression)
    inference = SVI(regression, guide, numpyro.optim.Adam(1e-2), Trace_ELBO(num_particles=3))
    data = regression_data()
    state = inference.init(jax.random.key(0), *data)

    def steps(x, y):
        def step(carry, _):
            return inference.update(carry, x, y)

        last, losses = lax.scan(step, state, None, length=4)
        return inference.get_params(last), losses

    return steps, data


def posterior(data):
    """Returns the log density of a regression's parameters."""
    x, y = data

    def density(position):
        rest = y - x @ position["weights"]
        return (-0.5 * jnp.sum(rest**2 * jnp.exp(-2 * position["log_scale"])) - y.size * position["log_scale"]
                - 0.5 * jnp.sum(position["weights"] ** 2))  # fmt: skip

    return density


@program("blackjax")
def blackjax_hmc():
    import blackjax

    def sample(data, start):
        kernel = blackjax.hmc(posterior(data), 0.05, jnp.ones(5), num_integration_steps=6)

        def step(state, key):
            state, info = kernel.step(key, state)
            return state, (state.position, info.acceptance_rate)

        return lax.scan(step, kernel.init(start), jax.random.split(jax.random.key(7), 5))[1]

    return sample, (regression_data(), {"weights": waves(4), "log_scale": jnp.array(-0.5)})


@program("blackjax", gradient=False)
def blackjax_nuts_with_adaptation():
    import blackjax

    def sample(data, start):
        adaptation = blackjax.window_adaptation(
            blackjax.nuts, posterior(data), initial_step_size=0.1, max_num_doublings=4
        )
        (state, parameters), _ = adaptation.run(jax.random.key(7), start, num_steps=6)
        return state.position, parameters["step_size"]

    return sample, (regression_data(), {"weights": waves(4), "log_scale": jnp.array(-0.5)})


@program("distrax")
def distrax_densities():
    import distrax

    def density(parameters, x):
        mean, rows, logits = parameters
        factor = jnp.tril(rows, -1) + jnp.diag(jnp.exp(jnp.diag(rows)))
        normal = distrax.MultivariateNormalTri(mean, factor)
        mixture = distrax.MixtureSameFamily(
            distrax.Categorical(logits=logits), distrax.Normal(mean, jnp.exp(mean))
        )
        gamma = distrax.Gamma(jnp.exp(mean), jnp.exp(logits))
        markov = distrax.HMM(
            distrax.Categorical(logits=logits),
            distrax.Categorical(logits=rows),
            distrax.Normal(mean, 0.5),
        )
        samples, probability = normal.sample_and_log_prob(seed=jax.random.key(2), sample_shape=(6,))
        return [
            normal.log_prob(x), mixture.log_prob(x[:, 0]), gamma.log_prob(jnp.abs(x) + 0.1), samples, probability,
            markov.forward(x[:, 0])[1], distrax.Normal(mean, 1.0).kl_divergence(distrax.Normal(0.0, jnp.exp(logits))),
            distrax.VonMises(mean, 2.0).log_prob(x), distrax.Dirichlet(jnp.exp(mean)).log_prob(jax.nn.softmax(x)),
        ]  # fmt: skip

    return density, (
        (waves(4), waves(4, 4, scale=0.4), waves(4, shift=2.0)),
        waves(9, 4, shift=1.0),
    )


@program("distrax")
def distrax_flow():
    import distrax

    def density(parameters, x):
        def conditioner(weights):
            return lambda y: jnp.tanh(y @ weights[0]) @ weights[1]

        def spline(numbers):
            return distrax.RationalQuadraticSpline(
                numbers.reshape(*numbers.shape[:-1], 4, 13), -3.0, 3.0
            )

        mask = jnp.arange(4) % 2 == 0
        layers = []
        for weights in parameters:
            coupling = distrax.MaskedCoupling(mask, conditioner(weights), spline)
            layers += [coupling]
            mask = ~mask
        flow = distrax.Inverse(distrax.Chain(layers))
        base = distrax.Independent(distrax.Normal(jnp.zeros(4), jnp.ones(4)), 1)
        return distrax.Transformed(base, flow).log_prob(x)

    weights = [(waves(4, 16, shift=k), waves(16, 52, scale=0.3, shift=k)) for k in range(2)]
    return density, (weights, waves(11, 4))
