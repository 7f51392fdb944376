"""The command line: a file for each command, and options that commands share.

Commands check what they can before torch is imported. What they run is in other folders: `LLM`,
`serving/`, `server/`, `lab/`, `lab/`.
"""
