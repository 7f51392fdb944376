"""What a request is: its prompt and parameters, their record on the device, its readers.

Where a request's keys and values lie is in `planning/`; text and grammars are in `text/`.
"""
