import type { RunSpec } from '../core/index.ts';
import type { Model } from '../model/contract.ts';
import { checkpointModel } from '../model/engine-model.ts';
import { resolveModel } from '../model/index.ts';
import { tinyRenderer } from '../model/render/tiny.ts';
import type { Platform } from './platform.ts';

const EMBEDDED = 'embedded/';

/** The model a run names, closed with the platform. `embedded/FOLDER` is a checkpoint of the embedded engine. */
export async function openModel(platform: Platform, model: RunSpec['model']): Promise<Model> {
  const opened = model.ref.startsWith(EMBEDDED)
    ? await checkpointModel(platform.engine(), model.ref.slice(EMBEDDED.length), {
        ref: model.ref,
        renderer: tinyRenderer,
      })
    : await resolveModel({
        ref: model.ref,
        env: process.env,
        folders: [process.cwd()],
        ...(model.baseUrl === undefined ? {} : { baseUrl: model.baseUrl }),
      });
  platform.closeLater(async () => opened.close?.());
  return opened;
}
