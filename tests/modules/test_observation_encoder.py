"""Features of images, indices and numbers, one after the other, by hand and without a host wait."""

import pytest
import torch
from torch import nn

from torchrl_perf.modules.encoders.observations import (
    EncodedCritic,
    EncodedInputs,
    ObservationEncoder,
    ObservationPart,
)
from torchrl_perf.runtime import no_host_sync

NUMBERS, BYTES = ObservationPart("numbers", (2, 2)), ObservationPart("numbers", (3,))
ONE, TWO = ObservationPart("choices", (), (3,)), ObservationPart("choices", (2,), (2, 3))


def test_numbers_bytes_and_indices_by_hand():
    encoder = ObservationEncoder([NUMBERS, BYTES, ONE, TWO])
    inputs = (
        torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]),
        torch.tensor([[0, 51, 255]], dtype=torch.uint8),
        torch.tensor([2]),
        torch.tensor([[1, 0]]),
    )
    with no_host_sync():
        found = encoder(*inputs)
    assert found.shape == (1, encoder.out_features) == (1, 15)
    torch.testing.assert_close(found[0], torch.tensor([1, 2, 3, 4, 0, 0.2, 1, 0, 0, 1, 0, 1, 1, 0, 0.0]))


def test_numbers_of_other_dtypes_and_without_dims():
    encoder = ObservationEncoder([ObservationPart("numbers", ()), ObservationPart("numbers", (1,))])
    found = encoder(torch.tensor([0.5, 1.5]), torch.tensor([[3], [-4]], dtype=torch.int32))
    torch.testing.assert_close(found, torch.tensor([[0.5, 3.0], [1.5, -4.0]]))


@pytest.mark.parametrize(
    ("shape", "layout", "features"),
    [
        ((4, 84, 84), "CHW", 512),
        ((84, 84, 3), "HWC", 512),
        ((16, 16, 3), "HWC", 128),
        ((1, 8, 8), "CHW", 128),
        ((64, 64), "CHW", 512),
    ],
)
def test_images_of_each_layout(shape, layout, features):
    part = ObservationPart("image", shape)
    assert (part.layout, part.features) == (layout, features)
    encoder = ObservationEncoder([part])
    image = torch.randint(0, 256, (2, 3, *shape), dtype=torch.uint8)
    found = encoder(image)
    assert found.shape == (2, 3, features)
    torch.testing.assert_close(found[1, 2], encoder(image[1, 2].unsqueeze(0)).squeeze(0))
    assert not torch.allclose(found[0, 0], found[0, 1])


def test_networks_on_features():
    encoder = ObservationEncoder([NUMBERS, ONE])
    states, kinds, action = torch.rand(5, 2, 2), torch.randint(0, 3, (5,)), torch.rand(5, 1)
    layer = nn.Linear(7, 2)
    torch.testing.assert_close(EncodedInputs(encoder, layer)(states, kinds), layer(encoder(states, kinds)))

    class Critic(nn.Module):
        def forward(self, features, action):
            return features.sum(-1, keepdim=True) + action

    found = EncodedCritic(encoder, Critic())(states, kinds, action)
    torch.testing.assert_close(found, states.sum((1, 2)).unsqueeze(-1) + 1 + action)
