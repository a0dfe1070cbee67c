"""What data sets hold as tests of a problem, and which of them a group meets."""

import json

import pytest

from megatron_rl.rewards.code_gold import BadGold, choose_tests, read_gold
from megatron_rl.rewards.sandbox.jobs import JobKind, Limits


def payloads(gold):
    return [json.loads(test.payload) for test in read_gold(gold).tests]


def test_pairs_of_text_are_standard_input_and_output():
    gold = read_gold(json.dumps({"inputs": ["1\n", ["2", "3"]], "outputs": ["a\n", "b"]}))
    assert [(t.kind, t.payload, t.expected) for t in gold.tests] == [
        (JobKind.STDIN, b"1\n", b"a\n"),
        (JobKind.STDIN, b"2\n3", b"b"),
    ]


def test_pairs_with_a_function_name_are_calls_in_either_form():
    listed = read_gold({"inputs": [[[1], "x"]], "outputs": [None], "fn_name": "f"}).tests[0]
    lines = read_gold({"inputs": ['[1]\n"x"\n'], "outputs": ["null"], "fn_name": "f"}).tests[0]
    assert listed == lines
    assert json.loads(listed.payload) == {"fn": "f", "args": [[1], "x"]}
    assert b"null" not in listed.payload and listed.expected is None


def test_a_list_of_tests_is_their_inputs_and_outputs():
    pairs = [("1", "2"), ("3\n", "4\n")]
    stdin = [{"input": i, "output": o, "testtype": "stdin"} for i, o in pairs]
    other = [{"input": i, "output": o, "type": "stdin_stdout", "fn_name": None} for i, o in pairs]
    columns = {"inputs": ["1", "3\n"], "outputs": ["2", "4\n"]}
    assert read_gold(stdin) == read_gold(json.dumps(other)) == read_gold(columns)
    call = {"input": '[1]\n"x"', "output": "null", "testtype": "functional", "metadata": {"func_name": "f"}}
    assert read_gold([call]) == read_gold({"inputs": [[[1], "x"]], "outputs": [None], "fn_name": "f"})


def test_files_stand_for_lists(tmp_path):
    (tmp_path / "in.json").write_text('["1\\n"]')
    (tmp_path / "out.json").write_text('["2\\n"]')
    gold = read_gold({"inputs_file": str(tmp_path / "in.json"), "outputs_file": str(tmp_path / "out.json")})
    assert gold == read_gold({"inputs": ["1\n"], "outputs": ["2\n"]})


def test_each_assertion_on_the_top_level_is_a_test_after_all_that_stands_before_it():
    first, second = payloads({"functional": "x = 1\nassert f(x) == 2\nx = 2\nassert f(x) == 3\ny = 1"})
    assert first["code"] == "x = 1\nassert f(x) == 2"
    tried = "try:\n    assert f(x) == 2\nexcept Exception:\n    pass"
    assert second["code"] == f"x = 1\n{tried}\nx = 2\nassert f(x) == 3"


def test_each_test_function_and_method_is_a_test():
    text = "def helper(): pass\ndef test_a(): pass\nclass TestB:\n    def test_c(self): pass\n    def other(self): pass"
    found = payloads({"pytest": [text, "def check(g):\n    assert g(1)\ncheck(f)"]})
    assert [one["entry"] for one in found] == ["test_a", "TestB.test_c", None]


@pytest.mark.parametrize(
    ("gold", "message"),
    [
        ("{", "not JSON"),
        (None, "NoneType"),
        ([], "list"),
        ([{"input": "1"}], "test 0 of a list is no object with `input` and `output`"),
        ([{"input": "1", "output": "1", "type": "function_call"}], "kinds \\['function_call'\\]"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "need .* the name of one"),
        ([{"input": "1", "output": "1", "fn_name": "f"}], "for the functions \\['f'\\]"),
        ({}, "no tests among the keys"),
        ({"inputs": [], "outputs": []}, "no tests"),
        ({"functional": [" "]}, "no tests"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs for 0 outputs"),
        ({"inputs": "1", "outputs": "1"}, "must both be lists"),
        ({"inputs": [1], "outputs": ["1"]}, "need text"),
        ({"inputs": [1], "outputs": ["1"], "fn_name": "f"}, "list of arguments"),
        ({"inputs": ["{"], "outputs": ["1"], "fn_name": "f"}, "one JSON value a line"),
        ({"inputs": ["1"], "outputs": ["1"], "fn_name": 3}, "`fn_name` is 3"),
        ({"functional": "assert f(1) =="}, "no Python"),
        ({"pytest": 3}, "no text"),
        ({"inputs_file": "/nowhere.json"}, "cannot be read"),
        ({"inputs": ["1"], "outputs": ["1"], "timeout": -1}, "`timeout` is -1"),
        ({"inputs": ["1"], "outputs": ["1"], "limits": {"gpu": 1}}, "'gpu'"),
        ({"inputs": ["1"], "outputs": ["1"], "limits": {"wall_s": True}}, "`wall_s` is True"),
    ],
)
def test_tests_that_prove_nothing_are_named(gold, message):
    with pytest.raises(BadGold, match=message):
        read_gold(gold)


def test_limits_of_a_problem_replace_ours_and_its_timeout_only_lowers_them():
    ours = Limits(wall_s=4.0, cpu_s=3.0, memory_mib=100)
    pair = {"inputs": ["1"], "outputs": ["1"]}
    assert read_gold({**pair, "timeout": 60}).limits_over(ours) == ours
    assert read_gold({**pair, "timeout": 1}).limits_over(ours) == Limits(
        wall_s=1.0, cpu_s=1.0, memory_mib=100
    )
    own = read_gold({**pair, "limits": {"wall_s": 9, "mem_mb": 512}}).limits_over(ours)
    assert own == Limits(wall_s=9.0, cpu_s=3.0, memory_mib=512)


def test_tests_are_drawn_by_prompt_alone_and_stay_in_order():
    gold = read_gold({"inputs": [str(i) for i in range(100)], "outputs": ["x"] * 100})
    drawn = choose_tests(gold, prompt_id="p1", max_tests=16)
    numbers = [int(test.payload) for test in drawn]
    assert len(set(numbers)) == 16 and numbers == sorted(numbers)
    assert drawn == choose_tests(gold, prompt_id="p1", max_tests=16)
    assert drawn != choose_tests(gold, prompt_id="p2", max_tests=16)
    assert choose_tests(gold, prompt_id="p1", max_tests=100) == list(gold.tests)
    few = read_gold({"inputs": ["1", "2"], "outputs": ["1", "2"], "max_test_cases": 1})
    assert len(choose_tests(few, prompt_id="p1", max_tests=16)) == 1
