import { existsSync, lstatSync, readlinkSync } from 'node:fs';

/** Paths that task formats write to by name: links into the sandbox's own /tmp, which no fork inherits. */
export const TASK_DIRECTORIES = ['tests', 'logs', 'solution'];

/** What a sandbox finds in /etc; nothing of the host's own accounts and names. */
export const SANDBOX_ETC: Readonly<Record<string, string>> = {
  passwd:
    'root:x:0:0:root:/:/usr/sbin/nologin\nagent:x:1000:1000:agent:/workspace:/bin/bash\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n',
  group: 'root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n',
  hosts: '127.0.0.1 localhost\n::1 localhost\n',
  hostname: 'sandbox\n',
  'nsswitch.conf': 'passwd: files\ngroup: files\nhosts: files\n',
};

/** Parts of the host's /etc that its programs need, where they exist. */
export const SHARED_ETC = ['ld.so.cache', 'localtime', 'alternatives'];

/** The host's system directories: folders to bind read-only, and links where the host has one (merged /usr). */
export function systemDirectories(): { binds: string[]; links: Record<string, string> } {
  const binds = ['/usr'];
  const links: Record<string, string> = {};
  for (const path of ['/bin', '/sbin', '/lib', '/lib32', '/lib64', '/libx32']) {
    if (!existsSync(path)) continue;
    if (lstatSync(path).isSymbolicLink()) links[path] = readlinkSync(path);
    else binds.push(path);
  }
  return { binds, links };
}
