"""A report's page, read as a file."""

from __future__ import annotations

import json
from html.parser import HTMLParser

VOID = {"meta", "br", "input", "img"}


class Page(HTMLParser):
    """Checks that every tag closes where it should, and collects tags, attributes and texts outside scripts."""

    def __init__(self, path):
        super().__init__()
        self.open, self.tags, self.attributes, self.words, self.scripts = [], [], [], [], []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        # what HTML lets stay open
        assert [tag for tag in self.open if tag not in {"li", "p"}] == []
        self.data = json.loads(self.scripts[0])

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.extend(attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        (self.scripts if self.open and self.open[-1] == "script" else self.words).append(data)

    @property
    def text(self):
        return " ".join(self.words)

    def figure(self, unit):
        return next(one for one in self.data["figures"] if unit in one["layout"]["yaxis"]["title"]["text"])
