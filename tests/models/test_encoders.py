import pytest
import torch

from tiltyard.errors import UseError
from tiltyard.models.actor_critic import Flat, MlpEncoder, Text, auto
from tiltyard.models.image_encoders import Impala, Nature, ResNet, Simple
from tiltyard.models.layers import Mlp
from tiltyard.types import ArraySpec


def image(*shape):
    return ArraySpec("box", shape, "uint8", image=True)


@pytest.mark.parametrize("make", [Simple, Nature, Impala, ResNet])
@pytest.mark.parametrize("shape", [(3, 64, 48), (64, 48, 3), (84, 84, 4)])
def test_images_are_encoded_with_channels_first_or_last(make, shape):
    encoder = make(image(*shape), size=32)
    assert encoder.size == 32
    x = torch.rand(2, *shape)
    assert encoder(x).shape == (2, 32)
    assert not torch.equal(encoder(x)[0], encoder(x)[1])


def test_channels_first_and_last_give_the_same_result():
    torch.manual_seed(0)
    one = Simple(image(3, 20, 24), size=8)
    torch.manual_seed(0)
    two = Simple(image(20, 24, 3), size=8)
    x = torch.rand(2, 3, 20, 24)
    torch.testing.assert_close(one(x), two(x.permute(0, 2, 3, 1)))


@pytest.mark.parametrize("make", [Simple, Nature, Impala, ResNet])
@pytest.mark.parametrize("shape", [(3, 40, 44), (40, 44, 3)])
def test_bytes_and_floats_give_the_same_result(make, shape):
    encoder = make(image(*shape), size=8)
    x = torch.randint(0, 256, (2, *shape), dtype=torch.uint8)
    torch.testing.assert_close(encoder(x), encoder(x.to(torch.float32) / 255))


@pytest.mark.parametrize("make", [Simple, ResNet])
@pytest.mark.parametrize("side", [1, 2, 5, 11])
def test_simple_and_resnet_accept_small_images(make, side):
    spec = ArraySpec("box", (side, side, 1), "uint8", image=True)
    assert make(spec, size=4)(torch.rand(3, side, side, 1)).shape == (3, 4)


@pytest.mark.parametrize("make", [Nature, Impala])
def test_too_small_image_is_refused_with_its_size(make):
    with pytest.raises(UseError, match="10 x 12"):
        make(image(10, 12, 3))


def test_image_encoders_refuse_other_observations():
    with pytest.raises(UseError, match="needs an image"):
        Simple(ArraySpec("box", (4,), "float32"))


def test_categories_are_encoded_as_one_hot():
    assert Flat(ArraySpec("discrete", (), "int64", (4,)))(torch.tensor([2, 0])).tolist() == [[0, 0, 1, 0], [1, 0, 0, 0]]
    pair = Flat(ArraySpec("multi_discrete", (2,), "int64", (2, 3)))
    assert pair.size == 5
    assert pair(torch.tensor([[1, 2]])).tolist() == [[0, 1, 0, 0, 1]]


def test_many_categories_are_encoded_with_an_embedding():
    encoder = Flat(ArraySpec("discrete", (), "int64", (100_000,)))
    assert encoder.size == 64
    assert encoder(torch.tensor([99_999, 0])).shape == (2, 64)


def test_mlp_encoder_has_the_configured_layers():
    encoder = MlpEncoder(ArraySpec("discrete", (), "int64", (4,)), hidden=[8, 6], activation="relu")
    assert encoder.size == 6
    assert encoder(torch.tensor([1, 3])).shape == (2, 6)
    assert (encoder(torch.tensor([1, 3])) >= 0).all()
    for wrong in ([], [0], [2.5]):
        with pytest.raises(UseError, match="must be a list of widths"):
            MlpEncoder(ArraySpec("box", (4,), "float32"), hidden=wrong)
    with pytest.raises(UseError, match="cannot read text"):
        MlpEncoder(ArraySpec("text", (32,), "int32", (4096,)))
    with pytest.raises(UseError, match="unknown activation 'rellu'") as error:
        MlpEncoder(ArraySpec("box", (4,), "float32"), activation="rellu")
    assert "relu" in error.value.hint


def test_padding_of_text_is_ignored():
    encoder = Text(ArraySpec("text", (6,), "int32", (4096,)), size=5)
    long = torch.tensor([[7, 9, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    short = torch.tensor([[7, 9], [0, 0]])
    torch.testing.assert_close(encoder(long), encoder(short))
    assert (encoder(long)[1] == 0).all()
    assert not torch.equal(encoder(torch.tensor([[9, 7]])), encoder(torch.tensor([[7, 9]])))  # order matters


def test_auto_selects_by_observation():
    assert isinstance(auto(ArraySpec("text", (32,), "int32", (4096,))), Text)
    assert isinstance(auto(ArraySpec("box", (4,), "float32")), Flat)
    assert auto(image(84, 84, 4)).size == 512
    assert auto(image(10, 10, 3)).size == 256


def test_mlp_without_hidden_layers_is_the_identity():
    assert torch.equal(Mlp([4], "tanh")(torch.ones(1, 4)), torch.ones(1, 4))
