"""What the site has beyond docs/: the files of results/ and recipes/, and those of the root.

They are mounted as if docs/ were the root, so that a link `../results/speed.md`, which is right in
the repository, is `results/speed.md` in the site.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
MOUNTED = ["CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "recipes/**/*.yaml"]
RESULTS = ["results/*.*", "results/reproduction/*.*"]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for pattern in MOUNTED + RESULTS:
        inclusion = InclusionLevel.NOT_IN_NAV if pattern in RESULTS else InclusionLevel.INCLUDED
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            urls = config.use_directory_urls
            files.append(File(name, str(ROOT), config.site_dir, urls, inclusion=inclusion))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_dir == config.docs_dir:
        return markdown.replace("](../", "](")
    return re.sub(r"\]\(((?:\.\./)*)docs/", r"](\1", markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    foreign = re.search(r"<(?:script|img|iframe|link)[^>]*\s(?:src|href)=\"?(?:https?:)?//", output)
    if foreign:
        raise PluginError(f"{page.file.src_uri} asks another host: {foreign.group()}...")
    return output
