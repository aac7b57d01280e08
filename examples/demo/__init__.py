"""`make demo`: a stale writer, with and without fencelock, on real servers and in real processes.

`story` is what happens, `worker` is the program that both worker processes run, `stage` starts and
directs them, `page` draws what was seen. Apart from the rest because nothing else needs it.
"""
