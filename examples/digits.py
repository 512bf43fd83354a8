"""Train a short run of a restricted Boltzmann machine to draw digits, through the chain.

The sampler is 20 sweeps of block Gibbs from noise, each of the visible layer and then the hidden
one. It is never run for longer: we train the distribution of the images at the *end of this short
run*, not the machine's equilibrium. The loss is the squared distance of the samples' means and pair
correlations `E[v_i v_j]` from those of the images. The gradient of a likelihood does not depend on
the 20 sweeps; the derivative through the chain does. Contrastive divergence (CD-1) makes 300
updates; for comparison, the last 50 of them are replaced by updates through the chain. The exact
log likelihood of both machines, a sum over all 65,536 states of the hidden layer, is printed too.

python examples/digits.py                        # writes digits.png
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from diffmh import sad
from diffmh.models import boltzmann
from diffmh.plots import style

PIXELS, HIDDEN, SWEEPS = 64, 16, 20
RATES = (0.01, 0.02, 0.05, 0.1)


def images():
    """8×8 digits in black and white: one half for training, the other held out."""
    pixels = (load_digits().data > 7.5).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(pixels))
    return np.split(jnp.asarray(pixels)[order], [len(pixels) // 2])


def blank(train):
    """Small couplings, and fields that give each pixel its mean."""
    machine = boltzmann.Restricted.random(jax.random.key(0), PIXELS, HIDDEN, 0.05)
    mean = jnp.clip(jnp.mean(train, axis=0), 0.01, 0.99)
    return boltzmann.Restricted(jnp.log(mean / (1 - mean)), machine.hidden, machine.couplings)


def pairs(images):
    """`E[v_i v_j]`, with the means on the diagonal."""
    return images.T @ images / len(images)


def distance(found, data):
    """The squared distance over the means and over each pair once."""
    return jnp.sum(jnp.triu(found - data) ** 2)


def draw(key, log_odds):
    return (jax.random.uniform(key, log_odds.shape) < jax.nn.sigmoid(log_odds)).astype(float)


def short_run(theta, key, count):
    """`count` images drawn by the sampler from noise, without derivatives."""
    key_start, key_sweeps = jax.random.split(key)

    def sweep(layers, key):
        key_visible, key_hidden = jax.random.split(key)
        visible = draw(key_visible, theta.visible + layers[1] @ theta.couplings.T)
        return (visible, draw(key_hidden, theta.hidden + visible @ theta.couplings)), None

    noise = jnp.zeros((count, PIXELS)), draw(key_start, jnp.zeros((count, HIDDEN)))
    return jax.lax.scan(sweep, noise, jax.random.split(key_sweeps, SWEEPS))[0][0]


def sampled(theta, key, direction):
    """`Σ_ij direction_ij v_i v_j` at the end of the sampler, as a program with draws. The last
    visible layer need not be drawn: its mean given the hidden layer is known.
    """
    key_start, key_sweeps = jax.random.split(key)

    def sweep(hidden, key):
        key_visible, key_hidden = jax.random.split(key)
        mean = jax.nn.sigmoid(theta.visible + theta.couplings @ hidden)
        visible = sad.bernoulli(key_visible, mean).astype(float)
        mean = jax.nn.sigmoid(theta.hidden + visible @ theta.couplings)
        return sad.bernoulli(key_hidden, mean).astype(float), None

    noise = draw(key_start, jnp.zeros(HIDDEN))
    hidden, _ = jax.lax.scan(sweep, noise, jax.random.split(key_sweeps, SWEEPS - 1))
    mean = jax.nn.sigmoid(theta.visible + theta.couplings @ hidden)
    return mean @ direction @ mean + jnp.sum(jnp.diagonal(direction) * mean * (1 - mean))


def through_the_chain(train, num_chains):
    """An unbiased gradient of the loss: that of `Σ_ij d_ij E[v_i v_j]` from some chains, with the
    direction `d = 2 (E[v vᵀ] − data)` from others. With 1104 parameters and 1520 draws in a chain
    that forgets quickly, the score of all draws has less variance than a few alternatives.
    """
    moment = sad.expectation(sampled, estimator=sad.Score(), num_replicates=num_chains)

    def gradient(theta, key):
        key_direction, key_chains = jax.random.split(key)
        found = pairs(short_run(theta, key_direction, 8 * num_chains))
        direction = 2 * jnp.triu(found - pairs(train))
        return jax.grad(moment)(theta, key_chains, direction)

    return gradient


def contrastive_divergence(train, num_chains=128):
    """CD-1: the moments after one sweep from the images, minus those of the images."""

    def statistics(theta, visible):
        hidden = jax.nn.sigmoid(theta.hidden + visible @ theta.couplings)
        outer = visible.T @ hidden / len(visible)
        return boltzmann.Restricted(visible.mean(0), hidden.mean(0), outer)

    def gradient(theta, key):
        key_batch, key_sweep = jax.random.split(key)
        batch = train[jax.random.randint(key_batch, (num_chains,), 0, len(train))]
        key_hidden, key_visible = jax.random.split(key_sweep)
        hidden = draw(key_hidden, theta.hidden + batch @ theta.couplings)
        after = draw(key_visible, theta.visible + hidden @ theta.couplings.T)
        ours, theirs = statistics(theta, after), statistics(theta, batch)
        return jax.tree.map(jnp.subtract, ours, theirs)

    return gradient


def trained(gradient, theta, num_updates, rate, report=None):
    """Adam with a rate that falls to a tenth; large gradients are clipped."""
    schedule = optax.exponential_decay(rate, num_updates, 0.1)
    optimizer = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(schedule))

    @jax.jit
    def update(theta, state, key):
        change, state = optimizer.update(gradient(theta, key), state)
        return optax.apply_updates(theta, change), state

    state = optimizer.init(theta)
    for number in range(num_updates):
        theta, state = update(theta, state, jax.random.fold_in(jax.random.key(1), number))
        if report is not None and (number + 1) % 10 == 0:
            report(number + 1, theta)
    return theta


def loss(theta, images, count=20_000):
    """The loss of the short run against these images."""
    return float(distance(pairs(short_run(theta, jax.random.key(2), count)), pairs(images)))


def sheet(ax, images, title):
    rows, columns = 6, 12
    tiles = np.pad(np.asarray(images[: rows * columns]).reshape(-1, 8, 8), ((0, 0), (1, 1), (1, 1)))
    page = tiles.reshape(rows, columns, 10, 10).swapaxes(1, 2).reshape(rows * 10, columns * 10)
    ax.imshow(1 - page, cmap="gray", vmin=0, vmax=1)
    ax.set_axis_off()
    style.name(ax, title)


def figure(held_out, machines):
    figure, axes = style.panels(*[4.2] * (1 + len(machines)), height=2.6)
    sheet(axes[0], held_out, "held-out images")
    for ax, (name, theta) in zip(axes[1:], machines.items(), strict=True):
        sheet(ax, short_run(theta, jax.random.key(3), 100), f"{SWEEPS} sweeps from noise: {name}")
    return figure


def describe(name, theta, held_out):
    """Print and return the loss."""
    found, likelihood = loss(theta, held_out), float(np.mean(theta.log_likelihood(held_out)))
    print(
        f"{name:32} loss {found:.3f}   exact log likelihood per image {likelihood:.2f}", flush=True
    )
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--of-them", type=int, default=50, help="updates through the chain")
    parser.add_argument("--chains", type=int, default=2048)
    parser.add_argument("--rate", type=float, default=0.005, help="rate of updates by the chain")
    parser.add_argument("--picture", default="digits.png")
    options = parser.parse_args()
    train, held_out = images()
    print(f"short run of {SWEEPS} sweeps against held-out images, {options.updates} updates each")
    print(f"the two halves of the images differ by {distance(pairs(train), pairs(held_out)):.3f}")
    cd_gradient, start = contrastive_divergence(train), blank(train)
    rivals = [trained(cd_gradient, start, options.updates, rate) for rate in RATES]
    for rate, rival in zip(RATES, rivals, strict=True):
        describe(f"CD-1, rate {rate}", rival, held_out)
    # CD-1 as usual: at the rate of the best likelihood.
    cd = max(rivals, key=lambda rival: np.mean(rival.log_likelihood(train)))
    # Before the updates through the chain: at the rate of the best short run in training.
    before = [
        trained(cd_gradient, start, options.updates - options.of_them, rate) for rate in RATES
    ]
    begun = min(before, key=lambda machine: loss(machine, train))
    describe(f"CD-1, {options.updates - options.of_them} updates", begun, held_out)
    report = lambda number, theta: describe(f"  {number} through the chain", theta, held_out)
    gradient = through_the_chain(train, options.chains)
    ours = trained(gradient, begun, options.of_them, options.rate, report)
    machines = {"CD-1": cd, "trained through the chain": ours}
    losses = [describe(name, machine, held_out) for name, machine in machines.items()]
    gentlest = min(loss(rival, held_out) for rival in rivals)
    print(f"loss through the chain / CD-1 at its best likelihood: {losses[1] / losses[0]:.2f}")
    print(f"loss through the chain / CD-1 at its best loss: {losses[1] / gentlest:.2f}")
    figure(held_out, machines).savefig(options.picture, dpi=150)


if __name__ == "__main__":
    main()
