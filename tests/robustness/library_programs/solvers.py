"""Differential equations, roots, minima and linear systems: diffrax, optimistix, lineax, jaxopt."""

import jax
import jax.numpy as jnp
import numpy as np

from .registry import program, waves


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

    return differential_equation(
        pendulum, diffrax.Tsit5(), jnp.array([1.1, 0.2]), jnp.array(0.15), 4.0
    )


@program("diffrax")
def diffrax_explicit_batch():
    import diffrax

    solve, (friction, _state) = differential_equation(
        pendulum, diffrax.Dopri8(), jnp.array([1.1, 0.2]), jnp.array(0.15), 3.0
    )
    return lambda friction, states: jax.vmap(solve, (None, 0))(friction, states)[0], (
        friction,
        waves(5, 2),
    )


@program("diffrax")
def diffrax_implicit():
    import diffrax

    rates = jnp.array([0.04, 3e3, 1e2])
    return differential_equation(
        robertson, diffrax.Kvaerno5(), jnp.array([1.0, 0.0, 0.0]), rates, 5.0
    )


@program("diffrax")
def diffrax_implicit_explicit():
    import diffrax

    def solve(parameters, state):
        terms = diffrax.MultiTerm(
            diffrax.ODETerm(lambda t, y, p: p[0] * jnp.sin(y)),
            diffrax.ODETerm(lambda t, y, p: -p[1] * y),
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
            diffrax.MultiTerm(drift, diffusion),
            diffrax.Heun(),
            0.0,
            1.0,
            0.05,
            state,
            parameters,
            max_steps=32,
        ).ys

    return solve, (jnp.array([0.5, 0.3]), waves(3))


def curve(parameters, points):
    return parameters[0] * jnp.exp(-parameters[1] * points) + parameters[2] * jnp.cos(points)


@program("optimistix")
def optimistix_newton():
    import optimistix

    def solve(constants, start):
        system = lambda y, c: jnp.stack([y[0] ** 2 + y[1] ** 2 - c[0], y[0] * jnp.exp(y[1]) - c[1]])
        return optimistix.root_find(
            system, optimistix.Newton(rtol=1e-5, atol=1e-6), start, constants
        ).value

    return solve, (jnp.array([3.0, 1.3]), jnp.array([1.0, 0.6]))


@program("optimistix")
def optimistix_levenberg_marquardt():
    import optimistix

    def solve(values, start):
        points = jnp.linspace(0.0, 3.0, 25)
        solver = optimistix.LevenbergMarquardt(rtol=1e-6, atol=1e-6)
        answer = optimistix.least_squares(
            lambda p, v: curve(p, points) - v, solver, start, values, throw=False
        )
        return answer.value

    points = np.linspace(0.0, 3.0, 25)
    values = curve(np.array([1.2, 0.8, 0.4]), points) + 0.01 * np.sin(37 * points)
    return solve, (jnp.asarray(values, float), jnp.array([1.0, 1.0, 0.0]))


@program("optimistix")
def optimistix_minimise_and_fixed_point():
    import optimistix

    def solve(constants, start):
        cost = lambda y, c: (
            jnp.sum((y - c) ** 2 * (1 + jnp.arange(4))) + 0.1 * jnp.sum(jnp.cos(y * y[::-1]))
        )
        least = optimistix.minimise(
            cost, optimistix.BFGS(rtol=1e-5, atol=1e-6), start, constants
        ).value
        step = lambda y, c: 0.5 * jnp.cos(y) + c
        point = optimistix.fixed_point(
            step, optimistix.FixedPointIteration(rtol=1e-6, atol=1e-6), start, constants
        ).value
        dogleg = optimistix.least_squares(
            lambda y, c: y**3 - c, optimistix.Dogleg(rtol=1e-5, atol=1e-6), start + 1, constants
        )
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
        ]

    return solve, (waves(12), waves(12, shift=1.0))


@program("jaxopt")
def jaxopt_lbfgs():
    import jaxopt

    # All that a cost reads is an argument of run: its rule of differentiation is traced after jit's
    # trace has ended, and a value closed over would outlive its trace, for jax.jit too.
    def solve(strength, x, y):
        def cost(weights, strength, x, y):
            return jnp.mean(jnp.logaddexp(0.0, -y * (x @ weights))) + strength * jnp.sum(weights**2)

        return jaxopt.LBFGS(cost, maxiter=40, tol=1e-4).run(jnp.zeros(4), strength, x, y).params

    return solve, (jnp.array(0.1), waves(50, 4), jnp.sign(waves(50, shift=1.0)))


@program("jaxopt")
def jaxopt_constrained():
    import jaxopt

    def solve(y, x):
        cost = lambda weights, y, x: jnp.mean((x @ weights - y) ** 2)
        start = jnp.full(4, 0.25)
        simplex = jaxopt.ProjectedGradient(
            cost, jaxopt.projection.projection_simplex, maxiter=200, tol=1e-5
        )
        lasso = jaxopt.ProximalGradient(cost, jaxopt.prox.prox_lasso, maxiter=200, tol=1e-5)
        gauss = jaxopt.GaussNewton(lambda w, y, x: jnp.tanh(x @ w) - y, maxiter=10)
        return (
            simplex.run(start, None, y, x).params,
            lasso.run(start, 0.05, y, x).params,
            gauss.run(0.1 * start, 0.3 * y, x).params,
        )

    x = waves(30, 4) ** 3  # of full rank, where waves alone have rank two
    return solve, (x @ jnp.array([0.1, 0.5, 0.3, 0.2]) + waves(30, scale=0.1, shift=1.0), x)
