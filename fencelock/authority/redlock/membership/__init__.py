"""Which nodes form the quorum, how their list begins to vote, how a node without memory votes again."""
