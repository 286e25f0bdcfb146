import pytest

from envs.rewards.exact import exact_match


@pytest.mark.parametrize(("completion", "answer"), [("46", "46"), (" 46\n", "46"), ("a  b", "a b"), ("", "  ")])
def test_texts_that_differ_in_white_space_only_match(completion, answer):
    assert exact_match(completion, answer) == 1.0


@pytest.mark.parametrize(("completion", "answer"), [("46.", "46"), ("4 6", "46"), ("A", "a"), ("", "46")])
def test_other_texts_do_not_match(completion, answer):
    assert exact_match(completion, answer) == 0.0
