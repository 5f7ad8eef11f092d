"""The `penstock report` command: one page on a run, with charts.

`report` runs and prints, `gather` reads the run and files of events, `boxes` folds the objects to
what a chart can show, `charts` describes the charts as plain data, `page` makes HTML of them, by
plotly.
"""
