"""The end of a run, as the driving rank tells it."""

from megatron_rl.recipe.load import load_recipe
from megatron_rl.train.reporter import Reporter
from tests.helpers.recipes import RECIPE


def test_a_page_that_cannot_be_written_makes_no_run_a_failed_one(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    (tmp_path / "run" / "report.html").mkdir(parents=True)
    with Reporter(tmp_path / "run", load_recipe(recipe), is_driver=True, resumed=None) as reporter:
        reporter.finish()
    assert "report.html: not written (IsADirectoryError" in capsys.readouterr().out
