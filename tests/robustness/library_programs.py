"""Typical programs of twelve libraries that are built on JAX, each a function of arrays with its first arguments.

A program imports its library when it is asked for. Its first argument, a tree of arrays, is what gradients are taken of.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True)
class Program:
    """A function that makes (function of arrays, arguments), the modules that it imports, and which derivative it has."""

    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    modules: tuple[str, ...]
    # "reverse", "forward" or "none"; loops without a bound, such as a search of a tree, have no reverse derivative.
    derivative: str


PROGRAMS: dict[str, Program] = {}


def program(*modules: str, derivative: str = "reverse") -> Callable:
    """Registers the function below under its own name."""

    def register(make):
        PROGRAMS[make.__name__] = Program(make, modules, derivative)
        return make

    return register


def waves(*shape: int, scale: float = 1.0, shift: float = 0.3) -> jax.Array:
    """Numbers without ties and without a pattern that a wrong index could hide in."""
    count = int(np.prod(shape))
    return jnp.asarray(scale * np.sin(1.7 * np.arange(count) + shift).reshape(shape), float)


# equinox


@program("equinox")
def equinox_mlp():
    import equinox as eqx

    model = eqx.nn.MLP(5, 3, 32, 2, activation=jax.nn.gelu, key=jax.random.key(0))
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)

    def loss(arrays, x, y):
        return jnp.mean((jax.vmap(eqx.combine(arrays, rest))(x) - y) ** 2)

    return loss, (arrays, waves(40, 5), waves(40, 3, shift=1.0))


@program("equinox")
def equinox_attention_and_norm():
    import equinox as eqx

    keys = jax.random.split(jax.random.key(1), 2)
    model = (eqx.nn.MultiheadAttention(3, 24, key=keys[0]), eqx.nn.LayerNorm(24), eqx.nn.GRUCell(24, 10, key=keys[1]))
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)

    def loss(arrays, x):
        attention, norm, cell = eqx.combine(arrays, rest)
        y = x + attention(jax.vmap(norm)(x), x, x, mask=jnp.tril(jnp.ones((17, 17), bool)))
        hidden, _ = lax.scan(lambda h, row: (cell(row, h), None), jnp.zeros(10, x.dtype), y)
        return jnp.sum(hidden**2)

    return loss, (arrays, waves(17, 24))


@program("equinox")
def equinox_convolution_and_batch_norm():
    import equinox as eqx

    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "batch", mode="batch")
    layers = (eqx.nn.Conv2d(2, 4, 3, padding=1, key=jax.random.key(2)), norm, eqx.nn.MaxPool2d(2, 2))
    arrays, rest = eqx.partition(layers, eqx.is_inexact_array)

    def loss(arrays, state, images):
        convolution, norm, pool = eqx.combine(arrays, rest)

        def one(image, state):
            y, state = norm(convolution(image), state)
            return pool(jax.nn.relu(y)), state

        y, state = jax.vmap(one, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(images, state)
        return jnp.mean(y**2), state

    return loss, (arrays, state, waves(6, 2, 10, 12))


# diffrax, optimistix, lineax


def pendulum(t, y, friction):
    del t
    return jnp.stack([y[1], -jnp.sin(y[0]) - friction * y[1]])


def robertson(t, y, rates):
    del t
    first, second = rates[0] * y[0], rates[2] * y[1] * y[2]
    third = rates[1] * y[1] ** 2
    return jnp.stack([-first + second, first - second - third, third])


def differential_equation(right_side, solver, state, parameters, end, tolerance=1e-5, **options):
    """Returns the states at nine times as a function of parameters and first state."""
    import diffrax

    def solve(parameters, state):
        answer = diffrax.diffeqsolve(
            diffrax.ODETerm(right_side), solver, 0.0, end, None, state, parameters,
            saveat=diffrax.SaveAt(ts=jnp.linspace(0.0, end, 9)), max_steps=512,
            stepsize_controller=diffrax.PIDController(rtol=tolerance, atol=tolerance * 1e-2), **options,
        )  # fmt: skip
        return answer.ys, answer.stats["num_accepted_steps"]

    return solve, (parameters, state)


@program("diffrax")
def diffrax_explicit():
    import diffrax

    return differential_equation(pendulum, diffrax.Tsit5(), jnp.array([1.1, 0.2]), jnp.array(0.15), 4.0)


@program("diffrax")
def diffrax_explicit_batch():
    import diffrax

    solve, (friction, state) = differential_equation(pendulum, diffrax.Dopri8(), jnp.array([1.1, 0.2]), jnp.array(0.15), 3.0)
    return lambda friction, states: jax.vmap(solve, (None, 0))(friction, states)[0], (friction, waves(5, 2))


@program("diffrax")
def diffrax_implicit():
    import diffrax

    rates = jnp.array([0.04, 3e3, 1e2])
    return differential_equation(robertson, diffrax.Kvaerno5(), jnp.array([1.0, 0.0, 0.0]), rates, 5.0)


@program("diffrax")
def diffrax_implicit_explicit():
    import diffrax

    def solve(parameters, state):
        terms = diffrax.MultiTerm(
            diffrax.ODETerm(lambda t, y, p: p[0] * jnp.sin(y)), diffrax.ODETerm(lambda t, y, p: -p[1] * y)
        )
        return diffrax.diffeqsolve(
            terms, diffrax.KenCarp4(), 0.0, 1.0, 0.05, state, parameters, max_steps=64,
            stepsize_controller=diffrax.PIDController(rtol=1e-4, atol=1e-6),
        ).ys  # fmt: skip

    return solve, (jnp.array([0.7, 20.0]), waves(4))


@program("diffrax")
def diffrax_adjoint_backwards():
    import diffrax

    adjoint = diffrax.BacksolveAdjoint()
    solve, arguments = differential_equation(
        pendulum, diffrax.Tsit5(), jnp.array([0.8, 0.1]), jnp.array(0.2), 2.0, adjoint=adjoint
    )
    return lambda friction, state: solve(friction, state)[0], arguments


@program("diffrax")
def diffrax_stochastic():
    import diffrax

    def solve(parameters, state):
        noise = diffrax.VirtualBrownianTree(0.0, 1.0, tol=1e-2, shape=(3,), key=jax.random.key(5))
        drift = diffrax.ODETerm(lambda t, y, p: -p[0] * y)
        diffusion = diffrax.ControlTerm(lambda t, y, p: p[1] * jnp.diag(jnp.cos(y)), noise)
        return diffrax.diffeqsolve(
            diffrax.MultiTerm(drift, diffusion), diffrax.Heun(), 0.0, 1.0, 0.05, state, parameters, max_steps=32
        ).ys

    return solve, (jnp.array([0.5, 0.3]), waves(3))


def curve(parameters, points):
    return parameters[0] * jnp.exp(-parameters[1] * points) + parameters[2] * jnp.cos(points)


@program("optimistix")
def optimistix_newton():
    import optimistix

    def solve(constants, start):
        system = lambda y, c: jnp.stack([y[0] ** 2 + y[1] ** 2 - c[0], y[0] * jnp.exp(y[1]) - c[1]])
        return optimistix.root_find(system, optimistix.Newton(rtol=1e-5, atol=1e-6), start, constants).value

    return solve, (jnp.array([3.0, 1.3]), jnp.array([1.0, 0.6]))


@program("optimistix")
def optimistix_levenberg_marquardt():
    import optimistix

    def solve(values, start):
        points = jnp.linspace(0.0, 3.0, 25)
        solver = optimistix.LevenbergMarquardt(rtol=1e-6, atol=1e-6)
        answer = optimistix.least_squares(lambda p, v: curve(p, points) - v, solver, start, values, throw=False)
        return answer.value

    points = np.linspace(0.0, 3.0, 25)
    values = curve(np.array([1.2, 0.8, 0.4]), points) + 0.01 * np.sin(37 * points)
    return solve, (jnp.asarray(values, float), jnp.array([1.0, 1.0, 0.0]))


@program("optimistix")
def optimistix_minimise_and_fixed_point():
    import optimistix

    def solve(constants, start):
        cost = lambda y, c: jnp.sum((y - c) ** 2 * (1 + jnp.arange(4))) + 0.1 * jnp.sum(jnp.cos(y * y[::-1]))
        least = optimistix.minimise(cost, optimistix.BFGS(rtol=1e-5, atol=1e-6), start, constants).value
        step = lambda y, c: 0.5 * jnp.cos(y) + c
        point = optimistix.fixed_point(step, optimistix.FixedPointIteration(rtol=1e-6, atol=1e-6), start, constants).value
        dogleg = optimistix.least_squares(lambda y, c: y**3 - c, optimistix.Dogleg(rtol=1e-5, atol=1e-6), start + 1, constants)
        return least, point, dogleg.value

    return solve, (jnp.array([0.4, 0.9, 0.6, 1.2]), jnp.full(4, 0.5))


@program("lineax")
def lineax_direct():
    import lineax

    def solve(matrix, vector):
        symmetric = matrix @ matrix.T + 4 * jnp.eye(7)
        operator = lineax.MatrixLinearOperator(matrix + 4 * jnp.eye(7))
        positive = lineax.MatrixLinearOperator(symmetric, lineax.positive_semidefinite_tag)
        band = lineax.TridiagonalLinearOperator(vector + 5, vector[:-1], vector[1:])
        tall = lineax.MatrixLinearOperator(jnp.concatenate([matrix, jnp.eye(7)]))
        wanted = jnp.concatenate([vector, vector[::-1]])
        return [
            lineax.linear_solve(operator, vector, lineax.LU()).value,
            lineax.linear_solve(positive, vector, lineax.Cholesky()).value,
            lineax.linear_solve(band, vector, lineax.Tridiagonal()).value,
            lineax.linear_solve(tall, wanted, lineax.QR()).value,
            lineax.linear_solve(operator, vector, lineax.AutoLinearSolver(well_posed=None)).value,
        ]

    return solve, (waves(7, 7), waves(7, shift=2.0))


@program("lineax")
def lineax_iterative():
    import lineax

    def solve(diagonal, vector):
        def product(x):
            return (diagonal**2 + 4) * x - jnp.roll(x, 1) - jnp.roll(x, -1)

        shape = jax.eval_shape(lambda: vector)
        positive = lineax.FunctionLinearOperator(product, shape, lineax.positive_semidefinite_tag)
        skewed = lineax.FunctionLinearOperator(lambda x: product(x) + 0.3 * jnp.roll(x, 1), shape)
        return [
            lineax.linear_solve(positive, vector, lineax.CG(rtol=1e-6, atol=1e-6)).value,
            lineax.linear_solve(skewed, vector, lineax.GMRES(rtol=1e-5, atol=1e-5)).value,
            lineax.linear_solve(skewed, vector, lineax.BiCGStab(rtol=1e-5, atol=1e-5)).value,
        ]

    return solve, (waves(12), waves(12, shift=1.0))


# numpyro, blackjax, distrax


def regression(x, y=None):
    """A Bayesian regression with a hierarchy of scales, as a model of numpyro."""
    import numpyro
    from numpyro import distributions

    scale = numpyro.sample("scale", distributions.HalfCauchy(1.0))
    weights = numpyro.sample("weights", distributions.Normal(0.0, scale).expand([x.shape[1]]).to_event(1))
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

    return density, ({"scale": jnp.array(0.8), "weights": waves(4), "degrees": jnp.array(5.0)}, *regression_data())


@program("numpyro", derivative="none")
def numpyro_nuts():
    from numpyro.infer import NUTS, init_to_value

    def sample(start, x, y):
        kernel = NUTS(regression, step_size=0.15, adapt_step_size=True, max_tree_depth=4,
                      init_strategy=init_to_value(values=start))  # fmt: skip
        state = kernel.init(jax.random.key(3), 2, None, (x, y), {})
        states = [state := kernel.sample(state, (x, y), {}) for _ in range(3)]
        return states[-1].z, [s.accept_prob for s in states], [s.num_steps for s in states], states[-1].adapt_state.step_size

    return sample, ({"scale": jnp.array(0.8), "weights": waves(4), "degrees": jnp.array(5.0)}, *regression_data())


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


@program("blackjax", derivative="none")
def blackjax_nuts_with_adaptation():
    import blackjax

    def sample(data, start):
        adaptation = blackjax.window_adaptation(blackjax.nuts, posterior(data), initial_step_size=0.1, max_num_doublings=4)
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
        mixture = distrax.MixtureSameFamily(distrax.Categorical(logits=logits), distrax.Normal(mean, jnp.exp(mean)))
        gamma = distrax.Gamma(jnp.exp(mean), jnp.exp(logits))
        markov = distrax.HMM(distrax.Categorical(logits=logits), distrax.Categorical(logits=rows), distrax.Normal(mean, 0.5))
        samples, probability = normal.sample_and_log_prob(seed=jax.random.key(2), sample_shape=(6,))
        return [
            normal.log_prob(x), mixture.log_prob(x[:, 0]), gamma.log_prob(jnp.abs(x) + 0.1), samples, probability,
            markov.forward(x[:, 0])[1], distrax.Normal(mean, 1.0).kl_divergence(distrax.Normal(0.0, jnp.exp(logits))),
            distrax.VonMises(mean, 2.0).log_prob(x), distrax.Dirichlet(jnp.exp(mean)).log_prob(jax.nn.softmax(x)),
        ]  # fmt: skip

    return density, ((waves(4), waves(4, 4, scale=0.4), waves(4, shift=2.0)), waves(9, 4, shift=1.0))


@program("distrax")
def distrax_flow():
    import distrax

    def density(parameters, x):
        def conditioner(weights):
            return lambda y: jnp.tanh(y @ weights[0]) @ weights[1]

        def spline(numbers):
            return distrax.RationalQuadraticSpline(numbers.reshape(*numbers.shape[:-1], 4, 13), -3.0, 3.0)

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


# jaxopt, flax


@program("jaxopt")
def jaxopt_lbfgs():
    import jaxopt

    def solve(strength, x, y):
        def cost(weights, strength):
            return jnp.mean(jnp.logaddexp(0.0, -y * (x @ weights))) + strength * jnp.sum(weights**2)

        return jaxopt.LBFGS(cost, maxiter=40, tol=1e-4).run(jnp.zeros(4), strength).params

    return solve, (jnp.array(0.1), waves(50, 4), jnp.sign(waves(50, shift=1.0)))


@program("jaxopt")
def jaxopt_constrained():
    import jaxopt

    def solve(y, x):
        cost = lambda weights, y: jnp.mean((x @ weights - y) ** 2)
        start = jnp.full(4, 0.25)
        simplex = jaxopt.ProjectedGradient(cost, jaxopt.projection.projection_simplex, maxiter=200, tol=1e-5)
        lasso = jaxopt.ProximalGradient(cost, jaxopt.prox.prox_lasso, maxiter=200, tol=1e-5)
        gauss = jaxopt.GaussNewton(lambda w, y: jnp.tanh(x @ w) - y, maxiter=10)
        return simplex.run(start, y=y).params, lasso.run(start, 0.05, y=y).params, gauss.run(0.1 * start, y=0.3 * y).params

    x = waves(30, 4)
    return solve, (x @ jnp.array([0.1, 0.5, 0.3, 0.2]) + waves(30, scale=0.1, shift=1.0), x)


@program("flax.linen", "optax")
def flax_linen_step():
    import flax.linen as nn
    import optax

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Conv(6, (3, 3))(x)))
            x = nn.avg_pool(x, (2, 2), (2, 2)).reshape(x.shape[0], -1)
            return nn.Dense(5)(nn.Dropout(0.3, deterministic=not train)(nn.gelu(nn.Dense(20)(x))))

    model, optimizer = Model(), optax.adamw(1e-2)
    images, labels = waves(8, 10, 10, 2), jnp.arange(8) % 5
    variables = model.init(jax.random.key(0), images, False)

    def step(parameters, statistics, moments, images, labels):
        def loss(parameters):
            logits, changed = model.apply({"params": parameters, "batch_stats": statistics}, images, True,
                                          mutable=["batch_stats"], rngs={"dropout": jax.random.key(1)})  # fmt: skip
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), changed

        (value, changed), gradient = jax.value_and_grad(loss, has_aux=True)(parameters)
        updates, moments = optimizer.update(gradient, moments, parameters)
        return value, optax.apply_updates(parameters, updates), changed["batch_stats"], moments

    parameters = variables["params"]
    return step, (parameters, variables["batch_stats"], optimizer.init(parameters), images, labels)


@program("flax.nnx", "optax")
def flax_nnx_step():
    import optax
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embedding = nnx.Embed(11, 12, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(3, 12, decode=False, rngs=rngs)
            self.norm, self.dropout = nnx.LayerNorm(12, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)
            self.out = nnx.Linear(12, 11, rngs=rngs)

        def __call__(self, tokens):
            x = self.embedding(tokens)
            return self.out(self.dropout(x + self.attention(self.norm(x), mask=nnx.make_causal_mask(tokens))))

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    graph, parameters, others = nnx.split((model, optimizer), nnx.Param, ...)
    tokens = jnp.arange(4 * 9).reshape(4, 9) * 7 % 11

    def step(parameters, others, tokens):
        model, optimizer = nnx.merge(graph, parameters, others, copy=True)

        def loss(model):
            logits = model(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, gradient = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradient)
        return value, nnx.state((model, optimizer))

    return step, (parameters, others, tokens)


# jax-md, e3nn-jax, brax


def lattice(count: int, spacing: float, dimensions: int) -> jax.Array:
    """Positions near a regular grid, none of which coincide."""
    grid = np.stack(np.meshgrid(*[np.arange(count)] * dimensions, indexing="ij"), -1).reshape(-1, dimensions)
    return jnp.asarray(grid * spacing, float) + waves(*grid.shape, scale=0.05 * spacing)


@program("jax_md")
def jax_md_minimisation():
    from jax_md import energy, minimize, space

    side = 4 * 1.15
    displacement, shift = space.periodic(side)

    def minimise(positions):
        potential = energy.soft_sphere_pair(displacement, sigma=1.2)
        init, apply = minimize.fire_descent(potential, shift, dt_start=0.05)
        state = lax.fori_loop(0, 12, lambda _, state: apply(state), init(positions))
        return potential(state.position), state.position

    return minimise, (lattice(4, 1.15, 2),)


@program("jax_md")
def jax_md_constant_energy():
    from jax_md import energy, quantity, simulate, space

    side = 3 * 1.2
    displacement, shift = space.periodic(side)

    def run(positions):
        potential = energy.lennard_jones_pair(displacement, r_cutoff=1.6, r_onset=1.3)
        init, apply = simulate.nve(potential, shift, 2e-3)
        state = init(jax.random.key(1), positions, kT=0.3)
        state = lax.fori_loop(0, 10, lambda _, state: apply(state), state)
        kinetic = quantity.kinetic_energy(momentum=state.momentum, mass=state.mass)
        return potential(state.position) + kinetic, state.position

    return run, (lattice(3, 1.2, 3),)


@program("jax_md")
def jax_md_neighbors():
    from jax_md import energy, partition, simulate, space

    side = 6 * 1.2
    displacement, shift = space.periodic(side)
    positions = lattice(6, 1.2, 2)
    make, potential = energy.lennard_jones_neighbor_list(
        displacement, side, r_cutoff=1.9, r_onset=1.6, dr_threshold=0.2, format=partition.NeighborListFormat.Sparse
    )
    first = make.allocate(positions, extra_capacity=8)

    def run(positions):
        init, apply = simulate.nvt_langevin(potential, shift, 2e-3, kT=0.3)

        def step(_, carry):
            state, neighbors = carry
            neighbors = neighbors.update(state.position)
            return apply(state, neighbor=neighbors), neighbors

        neighbors = first.update(positions)
        state, neighbors = lax.fori_loop(0, 5, step, (init(jax.random.key(1), positions, neighbor=neighbors), neighbors))
        return potential(state.position, neighbor=neighbors), state.position, neighbors.did_buffer_overflow

    return run, (positions,)


@program("e3nn_jax", "flax.linen")
def e3nn_message_passing():
    import e3nn_jax as e3nn
    import flax.linen as nn

    class Layer(nn.Module):
        target: str

        @nn.compact
        def __call__(self, graph, features):
            senders, receivers, vectors = graph
            messages = e3nn.concatenate([features[senders], e3nn.tensor_product(
                features[senders], e3nn.spherical_harmonics([1, 2], vectors, True))]).regroup()  # fmt: skip
            lengths = e3nn.norm(vectors).array
            radial = e3nn.bessel(lengths[:, 0], 6, 2.5) * e3nn.poly_envelope(5, 2)(lengths / 2.5)
            weights = e3nn.flax.MultiLayerPerceptron([16, messages.irreps.num_irreps], jax.nn.silu)(radial)
            summed = e3nn.scatter_sum(messages * weights, dst=receivers, output_size=features.shape[0]) / 2.0
            wanted = e3nn.Irreps(self.target)
            gates = wanted.filter(drop="0e").num_irreps
            out = e3nn.flax.Linear(wanted + e3nn.Irreps(f"{gates}x0e"))(summed)
            return e3nn.gate(out)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, positions, senders, receivers):
            vectors = e3nn.IrrepsArray("1o", positions[senders] - positions[receivers])
            features = e3nn.IrrepsArray("0e", jnp.ones((positions.shape[0], 1), positions.dtype))
            for target in ("8x0e + 4x1o + 2x2e", "4x0e"):
                features = Layer(target)((senders, receivers, vectors), features)
            return jnp.sum(features.array)

    positions = lattice(2, 1.1, 3)
    senders, receivers = np.nonzero(~np.eye(8, dtype=bool))
    model = Model()
    variables = model.init(jax.random.key(0), positions, senders, receivers)

    def energy_and_forces(arguments):
        variables, positions = arguments
        value, force = jax.value_and_grad(lambda p: model.apply(variables, p, senders, receivers))(positions)
        return value, -force

    return energy_and_forces, ((variables, positions),)


def environment(name: str, backend: str, steps: int):
    """Returns rewards and the last observation as a function of actions."""
    from brax import envs

    simulated = envs.get_environment(name, backend=backend)

    def rollout(actions, state):
        def step(state, action):
            state = simulated.step(state, action)
            return state, (state.reward, state.done)

        last, rewards = lax.scan(step, state, actions)
        return rewards, last.obs

    state = jax.jit(simulated.reset)(jax.random.PRNGKey(0))
    return rollout, (waves(steps, simulated.action_size, scale=0.6), state)


@program("brax.envs")
def brax_spring():
    return environment("inverted_pendulum", "spring", 3)


@program("brax.envs")
def brax_positional():
    return environment("reacher", "positional", 2)


@program("brax.envs")
def brax_generalized():
    return environment("inverted_double_pendulum", "generalized", 2)


@program("brax.envs", derivative="none")
def brax_with_contacts():
    return environment("hopper", "spring", 2)
