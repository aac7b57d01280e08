"""Which nodes form the quorum, how a list of them begins to vote, and how nodes that forgot vote again."""
