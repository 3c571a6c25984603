"""Laws of every view: pure answers, in every language, to every question; and only to questions."""

from __future__ import annotations

import json

import pytest

from roundelay.errors import InvalidArgumentError, RoundelayError
from roundelay.view.languages import LANGUAGES
from roundelay.web import Query
from roundelay.web.app import view_list
from roundelay.web.assets import assets
from roundelay.web.views import views

QUESTIONS = [(view.name, question) for view in views for question in view.answers]
HOSTILE = [
    "",
    "-1",
    "99999999999",
    "1e999",
    "NaN",
    "../../etc/passwd",
    "<script>",
    "\u0000",
    "x" * 5000,
]


@pytest.mark.parametrize("name", views.names())
def test_a_view_is_a_file_here_and_a_module_there(name: str) -> None:
    assert views.load(name).name == name
    assert f"/{name}.js" in assets()
    assert name in [each["name"] for each in view_list()["views"]]


@pytest.mark.parametrize(("name", "question"), QUESTIONS)
def test_answers_are_documents_in_every_language(name: str, question: str) -> None:
    answer = views.load(name).answers[question]
    for language in LANGUAGES:
        query = Query([("lang", language)])
        document = answer(query)
        query.finish()
        json.dumps(document, allow_nan=False)


@pytest.mark.parametrize(("name", "question"), QUESTIONS)
def test_whatever_is_asked_is_answered_or_refused(name: str, question: str) -> None:
    answer = views.load(name).answers[question]
    plain = Query()
    answer(plain)
    for parameter in sorted(plain._asked):
        for value in HOSTILE:
            try:
                document = answer(Query([(parameter, value)]))
            except RoundelayError as error:
                assert len(str(error)) < 3000
            else:
                json.dumps(document, allow_nan=False)


@pytest.mark.parametrize(("name", "question"), QUESTIONS)
def test_unknown_parameters_are_refused(name: str, question: str) -> None:
    query = Query([("nonsense", "1")])
    views.load(name).answers[question](query)
    with pytest.raises(InvalidArgumentError, match="nonsense"):
        query.finish()
