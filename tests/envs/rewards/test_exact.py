import pytest

from envs.rewards.exact import exact_match


@pytest.mark.parametrize(("completion", "answer"), [("46", "46"), (" 46\n", "46"), ("a  b", "a b"), ("", "  ")])
def test_texts_that_differ_in_white_space_only_match(completion, answer):
    assert exact_match(completion, answer) == 1.0


@pytest.mark.parametrize(("completion", "answer"), [("46.", "46"), ("4 6", "46"), ("A", "a"), ("", "46")])
def test_other_texts_do_not_match(completion, answer):
    assert exact_match(completion, answer) == 0.0


def test_reasoning_is_no_part_of_the_answer():
    assert exact_match("<think>\n47?\n</think>\n\n46", "46") == 1.0
    assert exact_match("47? No.</think>46", "46") == 1.0
    assert exact_match("<think>\n46", "46") == 0.0


def test_both_forms_of_a_letter_with_an_accent_match():
    assert exact_match("Cafe\u0301", "Caf\u00e9") == 1.0
