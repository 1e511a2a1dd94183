import { LonghaulError } from '../../core/index.ts';
import type { NetworkRule } from '../../sandbox/contract.ts';
import type { TaskToml } from './config.ts';
import { notSupported } from './invalid.ts';

const ALLOW_NEXT =
  'Name what it may reach: `longhaul run --allow HOST[:PORT]`, or set network_mode = "no-network" if the task can be solved offline.';

/**
 * Holds what a task says of the network against what the user allows: only the user opens it. A task that
 * asks for one is `CapabilityMissing` without their word, and `ConfigInvalid` is their word against a task
 * that says `no-network`, since agent and verifier share one sandbox. Returns notes for the user: hosts
 * that the task names and nobody allowed.
 */
export function requireNetwork(
  config: TaskToml,
  allow: readonly NetworkRule[],
  file: string,
): string[] {
  const environment = config.environment ?? {};
  const sections = { environment, agent: config.agent ?? {}, verifier: config.verifier ?? {} };
  const named = new Set<string>();
  for (const [section, { network_mode: mode, allowed_hosts: hosts = [] }] of Object.entries(
    sections,
  )) {
    if (allow.length > 0 && mode === 'no-network')
      throw new LonghaulError(
        'ConfigInvalid',
        `${file}: ${section}.network_mode: the task is to be solved with no network`,
        { next: 'Leave --allow out.' },
      );
    if (allow.length === 0 && mode !== undefined && mode !== 'no-network')
      throw notSupported(file, `${section}.network_mode`, 'a network is not allowed', ALLOW_NEXT);
    if (allow.length === 0 && hosts.length > 0)
      throw notSupported(file, `${section}.allowed_hosts`, 'a network is not allowed', ALLOW_NEXT);
    for (const host of hosts) named.add(host);
  }
  const asks = environment.allow_internet === true && environment.network_mode === undefined;
  if (asks && allow.length === 0)
    throw notSupported(file, 'environment.allow_internet', 'a network is not allowed', ALLOW_NEXT);
  if (environment.allow_internet === false && allow.length > 0)
    throw new LonghaulError(
      'ConfigInvalid',
      `${file}: environment.allow_internet: the task is to be solved with no network`,
      { next: 'Leave --allow out.' },
    );
  const allowed = new Set(allow.map(({ host }) => host));
  return [...named]
    .filter((host) => !allowed.has(host))
    .map((host) => `${file}: allowed_hosts: ${host} is not allowed by --allow`);
}
