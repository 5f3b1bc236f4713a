"""Search-QA: questions of seven data sets, answered with a search engine over a corpus of passages."""
