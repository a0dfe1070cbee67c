"""The `score` command: files of responses graded by the rewards that training uses."""
