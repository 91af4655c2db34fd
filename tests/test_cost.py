"""Operations counted against the textbook's numbers; what is said when memory is short."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from bism import cost
from bism.cost import memory_error, operations
from bism.models import ResNetEnergy

A, B = jnp.ones((3, 4)), jnp.ones((4, 5))


def test_products_and_convolutions_are_two_operations_a_multiplication():
    assert operations(jnp.matmul, A, B) == 2 * 3 * 4 * 5
    assert operations(jax.vmap(jnp.matmul), jnp.ones((7, 3, 4)), jnp.ones((7, 4, 5))) == 7 * 2 * 3 * 4 * 5
    conv = eqx.nn.Conv2d(3, 6, 3, padding=1, key=jax.random.key(0))
    assert operations(conv, jnp.ones((3, 8, 10))) == 2 * 8 * 10 * 6 * 3 * 9


def test_loops_count_their_length_and_branches_the_dearer_one():
    def loop(a):
        return jax.lax.scan(lambda a, _: (jnp.tanh(a @ a), None), a, length=10)[0]

    square = jnp.ones((4, 4))
    assert operations(jax.jit(loop), square) == 10 * 2 * 4**3
    branch = lambda a: jax.lax.cond(a.sum() > 0, lambda a: a @ a @ a, lambda a: a @ a, a)
    assert operations(branch, square) == 2 * 2 * 4**3


def test_gradients_of_a_strided_convolution_do_not_count_the_zeros_between():
    conv = eqx.nn.Conv2d(2, 3, 4, stride=2, padding=1, use_bias=False, key=jax.random.key(0))
    x = jnp.ones((2, 8, 8))
    forward = operations(conv, x)
    in_x = operations(jax.grad(lambda x: conv(x).sum()), x)
    in_kernel = operations(jax.grad(lambda conv, x: conv(x).sum()), conv, x)
    # The gradient in x is a convolution over the 8 × 8 positions of x with a quarter of the kernel in each.
    assert (forward, in_x, in_kernel) == (2 * 16 * 3 * 2 * 16, forward + 2 * 64 * 2 * 3 * 16 / 4, 2 * forward)


def test_the_papers_encoder_of_cifar10(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    encode = lambda key, v: ResNetEnergy((3, 32, 32), 50, width=128, blocks=3, key=key).encode(v)
    forward = operations(encode, jax.random.key(0), jnp.zeros((3, 32, 32)))
    assert 0.8 * 6.3e9 < forward < 6.3e9  # the paper's, less what merging the pools saves


def test_too_little_memory_says_what_would_fit(monkeypatch):
    monkeypatch.setattr(cost, "memory", lambda: 2**20)
    needs_megabytes = jax.jit(lambda x: jnp.linalg.inv(jnp.outer(x, x) + jnp.eye(512)))
    told = memory_error(RuntimeError("RESOURCE_EXHAUSTED: out of memory"), needs_megabytes, (jnp.ones(512),), 400)
    assert isinstance(told, MemoryError)
    assert "A batch of 400 does not fit into the memory of 0.0 GiB of" in str(told)
    fitting = re.findall(r"About (\d+) would fit", str(told))
    assert 1 <= int(fitting[0]) < 400
    other = RuntimeError("INTERNAL")
    assert memory_error(other, needs_megabytes, (), 1) is other
    with pytest.raises(MemoryError, match="Give a smaller batch_size"):
        raise memory_error(RuntimeError("RESOURCE_EXHAUSTED"), None, (), 1)
