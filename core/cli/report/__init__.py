"""The `penstock report` command: one page on a run, with charts.

`facts` reads the run and files of events, `charts` describes the charts as plain data, and `report`
runs, makes HTML of them by plotly, and prints.
"""
