"""The image models against the reference, through BiSM's own losses, and their merged and 16-bit arithmetic."""

from functools import cache, partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from golden_models import close, each, quick_jit

from bism import DSM, MDSM, BiSM, FirstOrder, Fisher, denoise, score, surrogate_score
from bism.bilevel import Draw, LowerLevel
from bism.models import ResidualNet, ResNetEnergy, ResNetFreeEnergy, conv_posterior
from bism.models.deep import average_pool, convolve
from bism.sampling import langevin_move, paper_temperatures

KEY = jax.random.key(0)
close_to_largest = partial(close, of_largest=1e-9)


def theta(model):
    """The parameters by their names in the reference."""
    layers = {"v2f.module.feature.0.conv": model.net.stem}
    for i, block in enumerate(model.net.blocks, 1):
        pooled = "conv.conv" if block.down else "conv"
        layers |= {
            f"v2f.module.feature.{i}.conv1.conv": block.conv1,
            f"v2f.module.feature.{i}.conv2.{pooled}": block.conv2,
            f"v2f.module.feature.{i}.conv_shortcut.{pooled}": block.shortcut,
        }
    return arrays_of(layers | {"f2h": model.to_h, "cp2e.linear": model.head.linear})


def phi(posterior):
    net = posterior.net
    return arrays_of(
        {f"conv{i}": conv for i, conv in enumerate(net.convs, 1)} | {"mean": net.mean, "log_std": net.log_std}
    )


def arrays_of(layers):
    both = {f"{name}.{part}": getattr(layer, part) for name, layer in layers.items() for part in ("weight", "bias")}
    return {name: x for name, x in both.items() if x is not None}


def fill(module, names, values):
    """The module with the reference's values, of which none may be left over."""
    parameters = names(module)
    assert parameters.keys() == values.keys()
    values = [jnp.asarray(values[name]).reshape(x.shape) for name, x in parameters.items()]
    return eqx.tree_at(lambda module: list(names(module).values()), module, values)


def stored(arrays, prefix):
    return {name.removeprefix(prefix + "."): x for name, x in arrays.items() if name.startswith(prefix + ".")}


def check_gradient(gradient, names, expected):
    parameters = names(gradient)
    assert parameters.keys() == expected.keys()
    for name, x in parameters.items():
        close_to_largest(x.reshape(expected[name].shape), expected[name])


def dense_phi(posterior):
    """A posterior with no parameter zero, by the golden README's recipe."""
    values = {}
    for k, (name, x) in enumerate(phi(posterior).items(), 1):
        i = np.arange(x.size, dtype=np.uint64)
        r = ((i**2 + 3 * i + k) * np.uint64(2654435761)) % 2**32
        fan = 25 if name.endswith("bias") else x[0].size
        values[name] = ((r + 0.5) / 2**31 - 1) * np.sqrt(3 / fan)
    return fill(posterior, phi, values)


@pytest.fixture(scope="module")
def g(golden):
    return golden("deep")


@pytest.fixture(scope="module")
def model(g):
    channels, height, width = (int(n) for n in g["v_shape"])
    shape = channels, height, width
    return fill(ResNetEnergy(shape, int(g["h_dim"]), width=int(g["channels"]), key=KEY), theta, stored(g, "theta"))


@pytest.fixture(scope="module")
def blank(model, g):
    return conv_posterior(model.net.shape, int(g["h_dim"]), key=KEY)


@pytest.fixture(scope="module")
def posterior(blank, g):
    return fill(blank, phi, stored(g, "phi"))


def mdsm(g, **settings):
    return MDSM(float(g["sigma_begin"]), float(g["sigma_end"]), float(g["sigma0"]), **settings)


def draw(g, kind, sigma):
    eps = g[f"{kind}_eps"]
    v = g["v"] + sigma[:, None, None, None] * eps
    return jax.tree.map(jnp.asarray, Draw(v, (eps, sigma), g[f"{kind}_eps_h"][:, None]))


def one_at_a_time(loss, draw):
    return jax.vmap(lambda draw: loss(jax.tree.map(lambda x: x[None], draw)))(draw)


def test_energy_and_its_gradients_agree_with_the_reference(model, g):
    def all_of(v, h):
        code, energy = model.encode(v), model.given(v)
        g2 = jnp.concatenate([code + h, h])
        return model.net(v), code, g2, model.head(g2), energy(h), *jax.grad(model.energy, (0, 1))(v, h)

    names = ("features", "g1", "g2", "energy", "energy", "grad_v_energy", "grad_h_energy")
    for actual, name in zip(each(all_of, g["v"], g["h"]), names, strict=True):
        close_to_largest(actual, g[name])
    particles = each(lambda v, hs: jax.vmap(model.given(v))(hs), g["v"], g["h_particles"].swapaxes(0, 1))
    close_to_largest(particles.T, g["energy_h_particles"])


def test_posterior_and_score_agree_with_the_reference(model, posterior, blank, g):
    def all_of(v, h, noise):
        q = posterior(v)
        return q.mean, q.log_std, q.sample(noise), q.log_prob(h), surrogate_score(model, posterior, h)(v)

    names = ("posterior_mean", "posterior_log_std", "posterior_sample", "log_q", "score")
    for actual, name in zip(each(all_of, g["v"], g["h"], g["lower_eps_h"]), names, strict=True):
        close_to_largest(actual, g[name])
    dense = each(dense_phi(blank), g["v"])
    close_to_largest(dense.mean, g["dense_posterior_mean"])
    close_to_largest(dense.log_std, g["dense_posterior_log_std"])


@cache
def lower_level(objective):
    @quick_jit
    def losses(model, posterior, draw):
        phi, frame = eqx.partition(posterior, eqx.is_inexact_array)
        lower = LowerLevel(Fisher(), objective, None, frame, optax.sgd(1.0))
        whole = lambda phi: lower(model, phi, draw)
        return one_at_a_time(lambda draw: lower(model, phi, draw), draw), jax.grad(whole)(phi)

    return losses


def test_the_lower_level_agrees_with_the_reference(model, posterior, g):
    inner = draw(g, "lower", g["noise_levels"])
    close(inner.v, g["lower_v_noised"], 1e-14)
    for objective, suffix in ((DSM(0.1), ""), (mdsm(g), "_div_sigma")):
        loss, gradient = lower_level(objective)(model, posterior, inner)
        close_to_largest(loss, g[f"lower_loss_cond_fisher{suffix}"])
        check_gradient(gradient, phi, stored(g, f"grad_phi_cond_fisher{suffix}"))


def test_the_lower_level_agrees_with_the_reference_where_no_parameter_is_zero(model, blank, g):
    posterior = dense_phi(blank)
    loss, gradient = lower_level(DSM(0.1))(model, posterior, draw(g, "lower", g["noise_levels"]))
    close_to_largest(loss, g["dense_lower_loss_cond_fisher"])
    values = phi(posterior)
    for name, x in phi(gradient).items():
        of = lambda what, name=name: g[f"dense_grad_phi_cond_fisher_{what}.{name}"]
        close(x.sum(), of("sum"))
        close((x**2).sum(), of("sumsq"))
        close((x * values[name]).sum(), of("dot_phi"))
        if name.startswith("conv") and name.endswith("weight"):
            close_to_largest(x.sum(0), of("sum_over_out"))
            close_to_largest(x.sum(1), of("sum_over_in"))


def test_the_upper_level_agrees_with_the_reference(model, posterior, blank, g):
    spaced = {"linear": "", "geometric": "_geometrical"}
    method = BiSM(mdsm(g), Fisher(), FirstOrder(), 0)
    draws = {}
    for spacing, suffix in spaced.items():
        close(mdsm(g, spacing=spacing).levels(len(g["v"])), g[f"noise_levels{suffix}"], 1e-14)
        draws[spacing] = draw(g, "upper", g[f"noise_levels{suffix}"])
    close(draws["linear"].v, g["upper_v_noised"], 1e-14)

    @quick_jit
    def losses(model, posterior, draw):
        def surrogate(v, h_noise):
            h = posterior(v).sample(h_noise[0])
            return h, surrogate_score(model, posterior, h)(v)

        each = one_at_a_time(lambda draw: method.upper(model, posterior, draw), draw)
        gradient = eqx.filter_grad(lambda model: method.upper(model, posterior, draw))(model)
        return each, gradient, *jax.vmap(surrogate)(draw.v, draw.h)

    loss, gradient, h, score = losses(model, posterior, draws["linear"])
    close_to_largest(h, g["upper_h"])
    close_to_largest(score, g["upper_score"])
    close(loss, g["upper_loss_bimdsm"])
    check_gradient(gradient, theta, stored(g, "grad_theta_bimdsm"))
    close(losses(model, posterior, draws["geometric"])[0], g["upper_loss_bimdsm_geometrical"])
    close(losses(model, dense_phi(blank), draws["linear"])[0], g["dense_upper_loss_bimdsm"])


def test_annealed_langevin_agrees_with_the_reference(model, golden):
    g = golden("langevin")
    close(paper_temperatures(), g["temperatures_schedule"], 1e-12)

    @quick_jit
    def run(energy, start, noise):
        """One chain for each of `start`, its noise along the second axis."""

        def step(x, given):
            noise, temperature = given
            values, gradient = jax.vmap(jax.value_and_grad(energy))(x)
            after = langevin_move(x, gradient, noise, g["sigma"], temperature)
            return after, (after, values)

        last, (states, energies) = jax.lax.scan(step, start, (noise, g["temperatures"]))
        return (
            states,
            energies,
            jax.vmap(energy)(last),
            jax.vmap(lambda x: denoise(energy, x, float(g["sigma0"])))(last),
        )

    joint = lambda x: model.energy(*x)
    conditional = lambda x: joint((x[0], jax.lax.stop_gradient(x[1])))  # h stays: no gradient, no noise
    h = jnp.asarray(g["h"])
    (v, same_h), energies, last, (denoised, _) = run(
        conditional, (g["v_init"], h), (g["noise"], 0 * g["joint_noise_h"])
    )
    close_to_largest(v, g["v_states"])
    close(jnp.concatenate([energies, last[None]]), g["energies"])
    close_to_largest(denoised, g["v_denoised"])
    assert (same_h == h[None]).all()

    (v, h), _, _, denoised = run(joint, (g["v_init"], g["joint_h_init"]), (g["noise"], g["joint_noise_h"]))
    for actual, name in zip((v, h, *denoised), ("v_states", "h_states", "v_denoised", "h_denoised"), strict=True):
        close_to_largest(actual, g[f"joint_{name}"])


def test_the_fully_visible_energy_has_the_same_head_on_the_features(model, g):
    visible = ResNetFreeEnergy(model.net.shape, width=4, key=KEY)
    visible = eqx.tree_at(lambda m: m.net, visible, model.net)
    weight, bias = (np.asarray(x) for x in (visible.head.linear.weight, visible.head.linear.bias))
    assert weight.shape == (64, 128)
    x = g["features"] @ weight.T + bias
    close(each(visible.free_energy, g["v"]), (np.where(x > 0, x, np.expm1(x)) ** 2).sum(1))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_convolution_and_its_pooling_are_one_convolution(platform, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    layer = eqx.nn.Conv2d(3, 5, 3, padding=1, key=KEY)
    x = jax.random.normal(jax.random.key(1), (3, 8, 16))
    close(convolve(layer, x), layer(x), 1e-12, 1e-12)
    close(convolve(layer, x, pool=True), average_pool(layer(x)), 1e-12, 1e-12)
    close(average_pool(x), eqx.nn.AvgPool2d(2, 2)(x), 1e-12, 1e-12)
    halving = eqx.nn.Conv2d(3, 4, 3, stride=2, padding=1, key=KEY)
    close(convolve(halving, x), halving(x), 1e-12, 1e-12)
    assert ("conv_general_dilated" in str(jax.make_jaxpr(partial(convolve, layer))(x))) == (platform == "gpu")


def test_the_whole_network_runs_its_encoder_once_for_all_h(model, g, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # where convolutions have a name to count
    v, hs = jnp.asarray(g["v"][0]), jnp.asarray(g["h_particles"][:, 0])
    of_one = str(jax.make_jaxpr(model.net)(v)).count("conv_general_dilated")
    assert (
        str(jax.make_jaxpr(lambda v, hs: jax.vmap(model.given(v))(hs))(v, hs)).count("conv_general_dilated") == of_one
    )
    assert of_one == 1 + 3 * 6


def in_single(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32) if eqx.is_inexact_array(x) else x, tree)


def relative(a, b):
    a, b = (jnp.concatenate([x.ravel() for x in jax.tree.leaves(tree)]) for tree in (a, b))
    return jnp.linalg.norm(a - b) / jnp.linalg.norm(b)


def digits_problem(dtype):
    """8×8 images; the same parameters whatever the precision."""
    shape, h_dim = (1, 8, 8), 4
    model = ResNetEnergy(shape, h_dim, width=16, dtype=dtype, key=KEY)
    posterior = conv_posterior(shape, h_dim, widths=(8, 16), dtype=dtype, key=jax.random.key(1))
    return in_single((model, posterior))


def test_sixteen_bits_change_little_and_only_inside():
    uniform = lambda seed, *shape: jax.random.uniform(jax.random.key(seed), shape, jnp.float32)
    v, h = uniform(2, 64, 1, 8, 8), uniform(3, 64, 4)
    noise = jax.random.normal(jax.random.key(4), v.shape, jnp.float32), jnp.full(64, 0.5, jnp.float32)
    method = BiSM(MDSM(), Fisher(), FirstOrder(), 0)

    @quick_jit
    def all_of(model, posterior):
        energy = jax.vmap(model.energy)(v, h)
        scores = jax.vmap(lambda v, h: surrogate_score(model, posterior, h)(v))(v, h)
        # Without the constant ε/σ₀², beside which the score would not be seen.
        square = lambda both: jnp.mean(
            jax.vmap(lambda v, h: jnp.sum(surrogate_score(both[0], both[1], h)(v) ** 2))(v, h)
        )
        upper = lambda both: method.upper(both[0], both[1], Draw(v, noise, h[:, None]))
        q = jax.vmap(posterior)(v)
        both = (model, posterior)
        return energy, scores, q, eqx.filter_grad(square)(both), eqx.filter_grad(upper)(both)

    single, mixed = (all_of(*digits_problem(dtype)) for dtype in (None, "bfloat16"))
    assert {x.dtype for x in jax.tree.leaves((single, mixed))} == {jnp.dtype("float32")}
    # One example's score passes 26 roundings to 8 bits; over a batch they average out.
    for (a, b), limit in zip(zip(mixed, single, strict=True), (0.01, 0.1, 0.01, 0.05, 0.05), strict=True):
        assert 1e-5 < relative(a, b) < limit


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_training_on_small_images_brings_both_levels_down(dtype):
    model, posterior = digits_problem(dtype)
    method = BiSM(MDSM(0.3, 1.0, 0.3), Fisher(), FirstOrder(), 2, optimizer=optax.adam(1e-3))
    row = jnp.where(jnp.arange(8) < 4, 0.2, 0.8).astype(jnp.float32)
    batch = jnp.broadcast_to(row, (16, 1, 8, 8))
    state = method.init(model, posterior, batch=batch, key=KEY)

    @eqx.filter_jit
    def train(state):
        dynamic, static = eqx.partition(state, eqx.is_array)

        def step(dynamic, key):
            state, metrics = method.step(eqx.combine(dynamic, static), batch, key)
            return eqx.partition(state, eqx.is_array)[0], metrics

        return jax.lax.scan(step, dynamic, jax.random.split(KEY, 200))[1]

    metrics = train(state)
    assert np.mean(metrics["loss"][-10:]) < 0.5 * np.mean(metrics["loss"][:5])
    assert np.mean(metrics["lower"][-10:]) < np.mean(metrics["lower"][:2])


def count(make):
    return sum(x.size for x in jax.tree.leaves(eqx.filter_eval_shape(make, KEY)) if hasattr(x, "size"))


def test_the_papers_sizes():
    mnist, cifar = (1, 32, 32), (3, 32, 32)
    assert round(count(lambda key: ResNetEnergy(mnist, 50, key=key)) / 1e6, 2) == 9.86
    assert round(count(lambda key: ResNetEnergy(cifar, 50, width=128, blocks=3, key=key)) / 1e6, 1) == 63.9
    assert round(count(lambda key: conv_posterior(cifar, 50, key=key)) / 1e6, 2) == 0.78
    assert len(eqx.filter_eval_shape(lambda key: ResidualNet(cifar, width=1, blocks=4, key=key), KEY).blocks) == 12


def test_shapes_and_settings_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="divisible by 8, not 28×30: pad the images to 32×32"):
        ResNetEnergy((1, 28, 30), 5, key=KEY)
    with pytest.raises(ValueError, match=r"\(channels, height, width\)"):
        ResNetFreeEnergy((32, 32), key=KEY)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="h_dim must be at least 1"):
        ResNetEnergy((1, 8, 8), 0, key=KEY)
    with pytest.raises(ValueError, match="blocks must be at least 1"):
        ResNetEnergy((1, 8, 8), 5, blocks=0, key=KEY)
    with pytest.raises(ValueError, match="widths must be at least 1"):
        conv_posterior((1, 8, 8), 5, widths=(), key=KEY)
    for make in (ResNetEnergy, conv_posterior):
        with pytest.raises(ValueError, match="'bfloat16', got 'float16'"):
            make((1, 8, 8), 5, dtype="float16", key=KEY)  # pyright: ignore[reportArgumentType]
    model, posterior = digits_problem(None)
    for shape in ((64,), (8, 8), (1, 16, 16)):
        with pytest.raises(ValueError, match=r"made for one image of shape \(1, 8, 8\)"):
            model.energy(jnp.zeros(shape), jnp.zeros(4))
        with pytest.raises(ValueError, match=r"made for one image of shape \(1, 8, 8\)"):
            posterior(jnp.zeros(shape))


@pytest.mark.parametrize("shape", [(1, 8, 8), (2, 12, 20), (3, 13, 9)])
def test_the_posterior_takes_images_of_any_size(shape):
    q = conv_posterior(shape, 3, widths=(2, 3, 4), key=KEY)(jnp.zeros(shape))
    assert q.mean.shape == q.sample(q.noise(KEY)).shape == (3,)


def test_the_visible_score_is_that_of_its_energy():
    model = ResNetFreeEnergy((1, 8, 8), width=2, blocks=1, key=KEY)
    v, direction = jax.random.uniform(KEY, (2, 1, 8, 8))
    difference = quick_jit(lambda: [model.free_energy(v + e * direction) for e in (1e-5, -1e-5)])()
    along = jnp.vdot(quick_jit(score(model))(v), direction)
    close(-(difference[0] - difference[1]) / 2e-5, along, 1e-6)
