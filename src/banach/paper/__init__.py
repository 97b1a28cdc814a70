"""The paper, study by study: each file states a claim, measures it and says what came out."""

from banach.paper.study import Findings, Options, Study

__all__ = ["Findings", "Options", "Study"]
