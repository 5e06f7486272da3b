"""Atoms and bodies: jax-md, e3nn-jax, brax."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .registry import program, waves


def lattice(count: int, spacing: float, dimensions: int) -> jax.Array:
    """Positions near a regular grid, none of which coincide."""
    grid = np.stack(np.meshgrid(*[np.arange(count)] * dimensions, indexing="ij"), -1).reshape(
        -1, dimensions
    )
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
        displacement,
        side,
        r_cutoff=1.9,
        r_onset=1.6,
        dr_threshold=0.2,
        format=partition.NeighborListFormat.Sparse,
    )
    first = make.allocate(positions, extra_capacity=8)

    def run(positions):
        init, apply = simulate.nvt_langevin(potential, shift, 2e-3, kT=0.3)

        def step(_, carry):
            state, neighbors = carry
            neighbors = neighbors.update(state.position)
            return apply(state, neighbor=neighbors), neighbors

        neighbors = first.update(positions)
        state, neighbors = lax.fori_loop(
            0, 5, step, (init(jax.random.key(1), positions, neighbor=neighbors), neighbors)
        )
        return (
            potential(state.position, neighbor=neighbors),
            state.position,
            neighbors.did_buffer_overflow,
        )

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
            weights = e3nn.flax.MultiLayerPerceptron([16, messages.irreps.num_irreps], jax.nn.silu)(
                radial
            )
            summed = (
                e3nn.scatter_sum(messages * weights, dst=receivers, output_size=features.shape[0])
                / 2.0
            )
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
        value, force = jax.value_and_grad(lambda p: model.apply(variables, p, senders, receivers))(
            positions
        )
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


@program("brax.envs", gradient=False)
def brax_with_contacts():
    return environment("hopper", "spring", 2)
