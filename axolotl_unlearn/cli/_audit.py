"""`axolotl unlearn request audit`: is anything of earlier deletion requests back?"""

from __future__ import annotations

from pathlib import Path

import click

from axolotl_unlearn.cli._json import answer


@click.command("audit")
@click.argument("model")
@click.argument("requests_dir", metavar="REQUESTS", type=click.Path(path_type=Path))
@click.option("--junit", "junit_file", type=click.Path(path_type=Path), help="Write junit XML.")
@click.option("--figures", type=click.Path(path_type=Path), help="Write them as JSON.")
@click.option("--device", help="[cuda where there is one, else cpu]")
@click.option("--batch-size", default=64, show_default=True)
@click.option("--quiet", is_flag=True, help="No progress bars.")
def command(
    model: str,
    requests_dir: Path,
    junit_file: Path | None,
    figures: Path | None,
    device: str | None,
    batch_size: int,
    quiet: bool,
) -> None:
    """Look for every deleted document of REQUESTS in MODEL, as it is now.

    For after further fine-tuning, merging or quantisation. Documents appear under the keyed ids of
    their records. Exit code 0: nothing is back; 3: something is; 2: it could not be tested.

    \b
    Example:
      axolotl unlearn request audit out/next-version requests/ --junit audit.xml
    """
    from axolotl_unlearn.files import write, write_json
    from axolotl_unlearn.requests.audit import audit_requests, junit

    found = audit_requests(
        model, requests_dir, device=device, batch_size=batch_size, progress=not quiet
    )
    answer(**found.to_json())
    if figures:
        write_json(figures, found.to_json())
    if junit_file:
        write(junit_file, junit(found))
    found.require_tested(requests_dir)
    click.echo("\n".join([*found.back_lines(), found.says]))
    if found.back:
        raise SystemExit(3)
