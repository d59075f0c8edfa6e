"""The largest of a row: equal to sorting, for every width, count and kind of ties."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ondevice.speculation.largest import estimated_likeliest, largest, likeliest


@given(st.integers(1, 6), st.sampled_from([5, 127, 128, 1024, 1152, 2048]), st.integers(1, 9), st.integers(0, 99))
def test_the_largest_are_those_of_sorting(rows, width, k, seed):
    k = min(k, width)
    scores = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    values, places = largest(scores, k)
    assert torch.equal(values, scores.sort(descending=True).values[:, :k])
    assert torch.equal(scores.gather(1, places), values)


@pytest.mark.parametrize("crowded", [0, 1, 15])
def test_all_of_them_may_lie_in_one_block_or_be_equal(crowded):
    scores = torch.zeros(2, 2048)
    scores[0, 128 * crowded : 128 * crowded + 8] = torch.arange(8.0) + 1
    values, places = largest(scores, 8)
    assert values[0].tolist() == [8, 7, 6, 5, 4, 3, 2, 1] and values[1].tolist() == [0] * 8
    assert places[0].tolist() == [128 * crowded + place for place in range(7, -1, -1)]
    assert all(len(set(row)) == 8 for row in places.tolist())


@pytest.mark.parametrize("spread", [0.5, 2.0, 6.0])
@pytest.mark.parametrize(("dtype", "k"), [(torch.float32, 8), (torch.bfloat16, 8), (torch.float32, 24)])
def test_probabilities_of_a_large_vocabulary_are_near_those_of_the_softmax(spread, dtype, k):
    logits = (spread * torch.randn(40, 49_152, generator=torch.Generator().manual_seed(1))).to(dtype)
    tokens, probabilities = estimated_likeliest(logits, k)
    scores = logits.float()
    assert torch.equal(scores.gather(1, tokens), scores.sort(descending=True).values[:, :k])
    ratio = probabilities / scores.softmax(-1).gather(1, tokens)
    assert (ratio.mean() - 1).abs() < 0.03 and ratio.std() < 0.1
    assert (probabilities.sum(-1) <= 1 + 1e-6).all()


@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_likeliest_tokens_are_exact_for_every_count(k):
    logits = 3 * torch.randn(9, 49_152, generator=torch.Generator().manual_seed(2))
    tokens, probabilities = estimated_likeliest(logits, k)
    assert torch.equal(logits.gather(1, tokens), logits.sort(descending=True).values[:, :k])
    assert (probabilities.diff(dim=-1) <= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_likeliest_of_each_row_is_the_first_of_the_greatest(dtype):
    logits = torch.randint(0, 9, (5, 300), generator=torch.Generator().manual_seed(0)).to(dtype)  # with many equals
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert likeliest(logits).tolist() == expected
    assert [int(likeliest(row)) for row in logits] == expected
