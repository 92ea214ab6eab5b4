"""What a rule over several keys yields when it does not hold."""

from dataclasses import dataclass

from pydantic import ValidationInfo

from millrace.config.paths import Path, dotted

COLLECT_RULES = "collect_rules"
"""Key of pydantic's validation context: true where the caller runs the rules by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A broken rule: the keys involved, the one to change first, and what is wrong with the remedy."""

    paths: tuple[Path, ...]
    message: str


def raise_for_rules(findings: list[Finding], info: ValidationInfo) -> None:
    """Raise one ValueError for all findings, unless the caller of pydantic collects them by itself."""
    if findings and not (info.context or {}).get(COLLECT_RULES):
        raise ValueError("; ".join(f"{dotted(finding.paths[0])} {finding.message}" for finding in findings))
