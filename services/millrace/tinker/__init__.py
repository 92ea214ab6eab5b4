"""`millrace tinker`: an HTTP service for the public Tinker SDK, whose requests survive the death of any process.

It stands above trainer and inference, whose parts it uses: names, records and log of a model; training, sampling and
the processes that do both; the HTTP API.
"""
