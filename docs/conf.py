"""Sphinx' settings of the documentation's site; `make docs` builds it (tools/site_build.py).

Nothing is loaded from another host: the theme has no fonts, and diagrams are drawn at the build.
"""

project = "hotkv"
html_title = "hotkv"
extensions = ["myst_parser"]
root_doc = "index"

# As GitHub reads the pages: links to headings by the same anchors, tasks and bare addresses.
myst_heading_anchors = 6
myst_enable_extensions = ["linkify"]
# `CHANGELOG.md` is a file, and no host of the domain .md.
myst_linkify_fuzzy_links = False

html_theme = "furo"
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_use_index = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
# Of a light and a dark page; readers choose, and their system's choice comes first.
pygments_style = "tango"
pygments_dark_style = "monokai"
