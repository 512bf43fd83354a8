"""Tells a release where it lives: README's links become absolute, and the package gets its URLs.

The place is that of the repository which makes the release, so no address is written down here:

    python .github/home.py OWNER/NAME TAG
"""

import pathlib
import re
import sys


def absolute(readme: str, repository: str, tag: str) -> str:
    """Pictures from where they can be loaded, pages from where they can be read."""
    pictures = f"https://raw.githubusercontent.com/{repository}/{tag}/"
    pages = f"https://github.com/{repository}/blob/{tag}/"
    link = re.compile(r"(!?)\[((?:[^\]]|\n)*?)\]\((?!https?:|#)([^)]+)\)")
    return link.sub(
        lambda m: f"{m[1]}[{m[2]}]({pictures if m[1] else pages}{m[3]})",
        readme,
    )


def with_urls(project: str, repository: str) -> str:
    owner, name = repository.split("/")
    home = f"https://github.com/{repository}"
    urls = {
        "Homepage": home,
        "Documentation": f"https://{owner.lower()}.github.io/{name}/",
        "Issues": f"{home}/issues",
        "Changelog": f"{home}/blob/main/CHANGELOG.md",
    }
    table = "".join(f'{key} = "{url}"\n' for key, url in urls.items())
    return project.replace("[project.scripts]\n", f"[project.urls]\n{table}\n[project.scripts]\n")


def main(repository: str, tag: str) -> None:
    root = pathlib.Path(__file__).parent.parent
    for name, change in (
        ("README.md", lambda text: absolute(text, repository, tag)),
        ("pyproject.toml", lambda text: with_urls(text, repository)),
    ):
        path = root / name
        path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
