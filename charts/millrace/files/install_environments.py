"""Install environment packages beside the image's own: python -c ... FOLDER REQUIREMENT...

Only what the image lacks is fetched. A package that wants another version of something that the image has fails here,
because the image's file system is read-only, and that is right: the image's versions were tested together.
"""

import pathlib
import subprocess
import sys
import sysconfig

folder, *requirements = sys.argv[1:]
subprocess.run([sys.executable, "-m", "pip", "install", "--prefix", folder, *requirements], check=True)
installed = pathlib.Path(sysconfig.get_path("purelib", "posix_prefix", {"base": folder}))
link = pathlib.Path(folder, "python")
if link.is_dir() and not link.is_symlink():  # an environment image came first: both in one folder
    for item in installed.iterdir():
        item.rename(link / item.name)
elif not link.exists():
    link.symlink_to(installed)
