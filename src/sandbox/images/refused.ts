import { LonghaulError } from '../../core/index.ts';

/** An archive that is at fault: `what` names the file or the blob, `why` what is wrong. */
export function refused(what: string, why: string, next?: string): LonghaulError {
  return new LonghaulError('FileRefused', `image ${what}: ${why}`, {
    next:
      next ??
      'Write the archive anew with `docker save`, `podman save --format oci-archive` or `skopeo copy`.',
  });
}
