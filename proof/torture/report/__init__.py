"""One page of HTML that shows what happened in a run of `python -m proof.torture`.

The history is read once (`facts.py`), its most telling moments are chosen (`moments.py`), and everything is
drawn as charts of the same few marks (`chart.py`, on the scales of `scale.py`): the moments lease by lease
(`timeline.py`), the whole run in bins of time (`overview.py`), tokens as stairs (`staircase.py`). `page.py`
puts it together with the template, the style and the script that lie beside it. The page needs nothing
else: no network, no fonts, and no script for reading it, which only adds zoom and a place for facts.
"""

from proof.torture.report.page import write_report

__all__ = ["write_report"]
